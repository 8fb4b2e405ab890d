"""The loop of a rollout: pull prompts as engines have room, score what finishes, write it at once."""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace

from olmorl.contract.generation import RolloutSample, SamplingParams
from olmorl.controller.group import ScoredSample
from olmorl.controller.loop import request_seed
from olmorl.controller.rollout import RolloutService
from olmorl.controller.scoring import Scorer
from olmorl.controller.signal import Changed
from olmorl.controller.step_metrics import rollout_row, truths
from olmorl.data.prompt import Prompt
from olmorl.rollouts.lookahead import Lookahead
from olmorl.rollouts.output import RolloutFiles
from olmorl.rollouts.tally import Tally

log = logging.getLogger(__name__)

LOOKAHEAD = 1024  # prompts among which the longest expected goes first
UNSCORED = 4  # times what the engines hold may wait for verdicts: beyond it, verifiers set the pace


class Roller:
    def __init__(
        self,
        *,
        service: RolloutService,
        scorer: Scorer | None,
        files: RolloutFiles,
        tally: Tally,
        params: SamplingParams,
        seed: int,
        capacity: int,
        attempt: int,
    ) -> None:
        """`capacity`: samples that are out to the engines at once; of one prompt there may be more."""
        self._service = service
        self._scorer = scorer
        self._files = files
        self._tally = tally
        self._params = params
        self._seed = seed
        self._capacity = capacity
        self._attempt = attempt
        self._changed = Changed()
        self._lookahead: Lookahead | None = None
        self.num_generating = 0
        """samples asked for and not received"""
        self.num_open = 0
        """samples asked for and not written"""

    async def run(self, prompts: Iterator[Prompt]) -> None:
        """To the end of `prompts`. Raises the first error of any of its parts."""
        lookahead = self._lookahead = Lookahead(prompts, size=LOOKAHEAD, guess=self._params.max_tokens)
        async with asyncio.TaskGroup() as tasks:
            while (prompt := lookahead.pop()) is not None:
                missing = self._tally.missing(prompt)
                if not missing:
                    continue
                await self._changed.until(lambda: self._has_room(len(missing)))  # noqa: B023 (awaited at once)
                self.num_generating += len(missing)
                self.num_open += len(missing)
                tasks.create_task(self._roll_out(prompt, missing))
                await asyncio.sleep(0)  # a long run of prompts must not keep the loop from its answers

    def _has_room(self, num_samples: int) -> bool:
        fits = self.num_generating + num_samples <= self._capacity or not self.num_generating
        return fits and self.num_open <= UNSCORED * self._capacity

    async def _roll_out(self, prompt: Prompt, missing: tuple[int, ...]) -> None:
        assert self._lookahead is not None, "run() made it"
        seed, admitted = request_seed(self._seed, prompt), time.time()
        params = replace(self._params, seed=seed)
        asked = self._service.generate(prompt.prompt_id, prompt.token_ids, params, sample_indices=missing)
        async with aclosing(asked) as arrivals:
            async for samples in arrivals:
                self.num_generating -= len(samples)
                self._changed.notify()
                for sample in samples:
                    self._lookahead.finished(prompt.data_source, len(sample.token_ids))
                scored = await self._score(prompt, samples)
                self._keep(prompt, scored, seed=seed, admitted=admitted)
                self.num_open -= len(samples)
                self._changed.notify()

    async def _score(self, prompt: Prompt, samples: Sequence[RolloutSample]) -> list[ScoredSample]:
        if self._scorer is None:
            return [ScoredSample(sample=sample, reward=None, verdict=None) for sample in samples]
        return await self._scorer.score(prompt, samples)

    def _keep(self, prompt: Prompt, scored: Sequence[ScoredSample], *, seed: int, admitted: float) -> None:
        rows, ground_truth = [], truths(prompt)
        for one in scored:
            sample = one.sample
            if sample.error is not None and not self._tally.finish_reasons[sample.finish_reason]:
                log.warning(
                    "sample %d of prompt %s ends early: %s (the summary counts all with finish_reason %s)",
                    sample.sample_index,
                    prompt.prompt_id,
                    sample.error,
                    sample.finish_reason,
                )
            row = rollout_row(
                prompt,
                one,
                step=0,
                attempt=self._attempt,
                seed=seed,
                t_admitted=admitted,
                ground_truth=ground_truth,
            )
            if self._tally.add(
                prompt.index,
                row.sample,
                prompt_token_ids=row.prompt_token_ids,
                num_tokens=len(row.token_ids),
                finish_reason=row.finish_reason,
                reward=row.reward,
                full_reward=prompt.full_reward,
                verdict=row.verdict,
            ):
                rows.append(row)
        self._files.write(rows)
