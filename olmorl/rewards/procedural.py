"""Rows of reasoning_gym are judged by the scorer of the task that made them."""

import functools
from collections.abc import Callable

from olmorl.contract.errors import ConfigError
from olmorl.rewards.answer_text import tagged_or_whole
from olmorl.rewards.verdict import Verdict, scored, unscorable


class ProceduralVerifier:
    """`reasoning_gym`: the ground truth is the whole entry, as the data source made it."""

    def __init__(self) -> None:
        try:
            import reasoning_gym
        except ImportError:
            raise ConfigError(
                "the verifier reasoning_gym needs the package of that name: pip install 'olmorl[reasoning-gym]'"
            ) from None
        self._find: Callable[[str], Callable[[str, dict], float]] = functools.cache(reasoning_gym.get_score_answer_fn)

    def __call__(self, completion: str, ground_truth: object, prompt: str | None = None) -> Verdict:
        metadata = ground_truth.get("metadata") if isinstance(ground_truth, dict) else None
        if not isinstance(metadata, dict) or "source_dataset" not in metadata:
            return unscorable(f"the ground truth {ground_truth!r:.80} is no entry of reasoning_gym")
        answer = tagged_or_whole(completion).strip()
        score = self._find(metadata["source_dataset"])(answer, ground_truth)  # type: ignore[arg-type]
        return scored(float(score), f"answer {answer[:80]!r}")
