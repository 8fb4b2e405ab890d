"""A language model as the judge, behind any OpenAI-compatible endpoint.

Equal questions are asked once, also when they are asked at the same time. A judge that is down makes a verdict a
timeout; one whose answers hold no score, after some tries, an error. Neither is ever a reward of 0.
"""

import asyncio
import json
import re
from collections import OrderedDict
from dataclasses import dataclass

from olmorl.contract.errors import ConfigError
from olmorl.rewards.answer_text import tagged_or_whole, without_thoughts
from olmorl.rewards.endpoint import Endpoint, Refused
from olmorl.rewards.judge_prompts import KINDS, ask_about_rubric, ask_for_score
from olmorl.rewards.settings import VerifierSettings
from olmorl.rewards.verdict import Verdict, scored, unscorable

CACHE_SIZE = 16384
TRIES = 3  # for an answer that holds a score
SCORE = re.compile(r"[\"']?score[\"']?\s*[:=]\s*[\"']?(-?\d+(?:\.\d+)?)", re.IGNORECASE)
BARE_NUMBER = re.compile(r"(-?\d+(?:\.\d+)?)(?:\s*/\s*\d+)?\s*\.?")


class Judge:
    """`judge` and the general-* names: one instance for each, all of one run behind one `Bench`."""

    def __init__(self, bench: "Bench", kind: str) -> None:
        self._bench = bench
        self._kind = kind
        self.endpoint = bench.endpoint

    async def __call__(self, completion: str, ground_truth: object, prompt: str | None = None) -> Verdict:
        if self._kind == "rubric":
            return await self._judge_rubric(completion, ground_truth, prompt)
        reference = "" if ground_truth is None else str(ground_truth)
        if KINDS[self._kind].needs_reference and not reference.strip():
            return unscorable(f"the judge {self._kind} needs a ground truth, and there is none")
        answer = tagged_or_whole(completion).strip()
        if not answer:
            return scored(0.0, "no answer in the completion")
        question = ask_for_score(self._kind, prompt=prompt or "", answer=answer, reference=reference)
        try:
            score = await self._bench.score(question, lowest=0.0, highest=10.0)
        except Refused as error:
            return Verdict(status="error", detail=f"judge: {error}")
        return scored(score / 10.0)

    async def _judge_rubric(self, completion: str, ground_truth: object, prompt: str | None) -> Verdict:
        rubric = read_rubric(ground_truth)
        if rubric is None:
            return unscorable(f"the ground truth {ground_truth!r:.120} is no {{query, rubrics}}")
        query, criteria = rubric
        answer = tagged_or_whole(completion).strip()
        if not answer:
            return scored(0.0, "no answer in the completion")
        questions = [
            ask_about_rubric(criterion, prompt=query or prompt or "", answer=answer) for criterion, _ in criteria
        ]
        try:
            scores = await asyncio.gather(*(self._bench.score(q, lowest=0.0, highest=2.0) for q in questions))
        except Refused as error:
            return Verdict(status="error", detail=f"judge: {error}")
        total = sum(weight for _, weight in criteria)
        return scored(sum(s / 2.0 * weight for s, (_, weight) in zip(scores, criteria, strict=True)) / total)


def read_rubric(ground_truth: object) -> tuple[str, list[tuple[str, float]]] | None:
    """The query, and each criterion with its weight, from {query, rubrics: [{description, weight}]} or its JSON."""
    try:
        value = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        assert isinstance(value, dict)
        criteria = [(str(entry["description"]), float(entry.get("weight", 1.0))) for entry in value["rubrics"]]
    except (ValueError, RecursionError, KeyError, TypeError, AssertionError, AttributeError):
        return None
    weights = [weight for _, weight in criteria]
    return (str(value.get("query") or ""), criteria) if weights and min(weights) >= 0 and sum(weights) > 0 else None


@dataclass(slots=True)
class _Asked:
    task: asyncio.Task[float]
    waiting: int = 0


class Bench:
    """Where all judges of a run sit: one endpoint, one cache."""

    def __init__(self, settings: VerifierSettings) -> None:
        if not settings.judge_url or not settings.judge_model:
            raise ConfigError(
                "a judge is asked for, but there is none: set reward.judge_url (or OPENAI_BASE_URL) to an "
                "OpenAI-compatible endpoint, e.g. http://localhost:8000/v1, and reward.judge_model to its model"
            )
        self.endpoint = Endpoint(
            settings.judge_url,
            key="reward.judge_url",
            api_key=settings.judge_api_key,
            concurrency=settings.judge_concurrency,
            requests_per_second=settings.judge_requests_per_second,
        )
        self._model = settings.judge_model
        self._max_tokens = settings.judge_max_tokens
        self._cache: OrderedDict[str, _Asked] = OrderedDict()

    async def score(self, question: str, *, lowest: float, highest: float) -> float:
        """Raises Refused when the judge does not give a score."""
        asked = self._cache.get(question)
        if asked is None:
            asked = self._cache[question] = _Asked(asyncio.create_task(self._ask(question, lowest, highest)))
            while len(self._cache) > CACHE_SIZE:
                self._cache.popitem(last=False)
        self._cache.move_to_end(question)
        asked.waiting += 1
        try:
            # Shielded: who runs out of time leaves the others their answer.
            return await asyncio.shield(asked.task)
        finally:
            asked.waiting -= 1
            done = asked.task.done() and not asked.task.cancelled() and asked.task.exception() is None
            if not done and not asked.waiting:  # a failure is not kept, and nobody asks for nobody
                asked.task.cancel()
                if self._cache.get(question) is asked:
                    del self._cache[question]

    async def _ask(self, question: str, lowest: float, highest: float) -> float:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": self._max_tokens,
            "temperature": 0.0,
        }
        text = ""
        for attempt in range(TRIES):
            reply = await self.endpoint.post("chat/completions", {**body, "seed": attempt})
            text = _read_content(reply)
            score = read_score(text)
            if score is not None and lowest <= score <= highest:
                return score
        raise Refused(f"no score from {lowest:g} to {highest:g} in the judge's answer {text[-200:]!r}")

    async def close(self) -> None:
        tasks = [asked.task for asked in self._cache.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.endpoint.close()


def _read_content(reply: object) -> str:
    try:
        content = reply["choices"][0]["message"]["content"]  # type: ignore[index]
    except (KeyError, IndexError, TypeError):
        raise Refused(f"not an answer of a chat model: {str(reply)[:200]}") from None
    if not isinstance(content, str | None):  # parts of several kinds
        raise Refused(f"no text: {content!r:.200}")
    return content or ""


def read_score(text: str) -> float | None:
    """The last "score": n behind the judge's own thoughts, or a number that stands alone."""
    text = without_thoughts(text)
    found = SCORE.findall(text)
    if found:
        return float(found[-1])
    bare = BARE_NUMBER.fullmatch(text.strip())
    return float(bare[1]) if bare else None
