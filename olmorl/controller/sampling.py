"""The samples of one prompt, from request to verdict: of one turn each, or of several with an environment between.

When an inference worker is lost, turns that are done are kept, for their tokens are here, and the turn under way is
drawn again elsewhere under the same seed and sample index. Groups under way when the driver ends start over.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from olmorl.contract.generation import FinishReason, RolloutSample, SamplingParams
from olmorl.controller.environments import Environments, Rules
from olmorl.controller.episode import Episode
from olmorl.controller.group import ScoredSample
from olmorl.controller.rollout import RolloutService
from olmorl.controller.scoring import Scorer
from olmorl.data.prompt import Prompt
from olmorl.rewards.verdict import Verdict

Received = Callable[[Sequence[RolloutSample]], None]
Deliver = Callable[[list[ScoredSample]], None]


async def sample_prompt(
    prompt: Prompt,
    *,
    request_id: str,
    params: SamplingParams,
    service: RolloutService,
    scorer: Scorer,
    deliver: Deliver,
    received: Received = lambda samples: None,
    priority: int = 0,
) -> None:
    """`received` is told of what engines finished, each turn by itself, `deliver` of samples with their verdicts.
    Returns when all params.n are delivered."""
    if prompt.environment is None:
        if prompt.lengths is not None:
            params = replace(params, ignore_eos=True)
        arrivals = service.generate(request_id, prompt.token_ids, params, priority=priority, lengths=prompt.lengths)
        async with aclosing(arrivals):
            async for samples in arrivals:
                received(samples)
                deliver(await scorer.score(prompt, samples))
        return
    assert scorer.environments is not None, "environments were not started"
    rules = scorer.environments.rules(prompt.environment)
    player = _Player(
        prompt=prompt,
        request_id=request_id,
        params=replace(params, stop=(*params.stop, *rules.stop)),
        service=service,
        scorer=scorer,
        environments=scorer.environments,
        rules=rules,
        received=received,
        priority=priority,
    )
    await player.play(deliver)


class _Player:
    """Plays the episodes of one prompt, each by itself after the turn they share a request for."""

    def __init__(
        self,
        *,
        prompt: Prompt,
        request_id: str,
        params: SamplingParams,
        service: RolloutService,
        scorer: Scorer,
        environments: Environments,
        rules: Rules,
        received: Received,
        priority: int,
    ) -> None:
        assert params.seed is not None, "what an environment draws hangs on the seed"
        self._prompt = prompt
        self._request_id = request_id
        self._params = params
        self._seed = params.seed
        self._service = service
        self._scorer = scorer
        self._environments = environments
        self._rules = rules
        self._received = received
        self._priority = priority

    async def play(self, deliver: Deliver) -> None:
        async def finish(first: RolloutSample) -> None:
            deliver([await self._play_one(first)])

        arrivals = self._service.generate(
            self._request_id, self._prompt.token_ids, self._params, priority=self._priority
        )
        async with aclosing(arrivals), asyncio.TaskGroup() as tasks:
            async for samples in arrivals:
                self._received(samples)
                for sample in samples:
                    tasks.create_task(finish(sample))

    async def _play_one(self, turn: RolloutSample) -> ScoredSample:
        episode = Episode(self._prompt.token_ids, max_tokens=self._params.max_tokens)
        while True:
            episode.draw(turn, self._environments.decode(turn.token_ids))
            if turn.finish_reason == "abort":
                return await self._end(episode, turn, "abort", None)
            verdict = await self._environments.step(self._prompt, episode.turns, seed=self._seed)
            last = turn.finish_reason == "length" or len(episode.turns) == self._rules.max_turns
            if verdict.observation is None or last:
                return await self._end(episode, turn, turn.finish_reason, verdict)
            observation = self._environments.encode(verdict.observation)
            if len(observation) >= episode.room:
                return await self._end(episode, turn, "length", verdict)
            episode.observe(observation, verdict.observation)
            turn = await self._draw(episode, turn)

    async def _draw(self, episode: Episode, before: RolloutSample) -> RolloutSample:
        index = before.sample_index
        arrivals = self._service.generate(
            f"{self._request_id}/{index}.{len(episode.turns)}",
            episode.context,
            replace(self._params, max_tokens=episode.room),
            priority=self._priority,
            sample_indices=(index,),
            prefer=before.worker,
        )
        async with aclosing(arrivals):
            async for samples in arrivals:
                self._received(samples)
                return samples[0]
        raise AssertionError("a request ended without its sample")

    async def _end(
        self, episode: Episode, turn: RolloutSample, finish_reason: FinishReason, verdict: Verdict | None
    ) -> ScoredSample:
        """The row's verifiers judge the last turn; the environment's own rewards are added."""
        sample = episode.sample(finish_reason)
        if verdict is not None and verdict.status != "scored":
            self._scorer.tell_of(verdict, of=self._prompt.environment or "", prompt=self._prompt)
            return ScoredSample(
                sample=sample, reward=None, verdict=verdict.status, detail=verdict.detail, drawn=episode.drawn
            )
        [scored] = await self._scorer.score(self._prompt, [turn])
        if scored.reward is not None and verdict is not None:
            scored.reward += verdict.reward or 0.0
        scored.sample, scored.drawn = sample, episode.drawn
        return scored
