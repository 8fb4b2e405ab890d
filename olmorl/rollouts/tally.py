"""Which samples are there, and how good they are: a few bytes a prompt, so that millions of prompts fit.

Prompts are known by their row. What an earlier attempt wrote is counted in the same way as what this one writes.
"""

import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from olmorl.contract.errors import ConfigError
from olmorl.data.prompt import Prompt, passes


class Tally:
    def __init__(self, samples_per_prompt: int) -> None:
        self._n = samples_per_prompt
        self._row_bytes = -(-samples_per_prompt // 8)
        self._done = bytearray()  # a bit for each sample
        self._digests = array("I")  # of a prompt's token ids, 0 while none of its samples is there
        self._scored, self._solved = array("H"), array("H")
        self.num_samples = 0
        self.num_tokens = 0
        self.reward_sum = 0.0
        self.verdicts: Counter[str] = Counter()
        self.finish_reasons: Counter[str] = Counter()

    def add(
        self,
        index: int,
        sample: int,
        *,
        prompt_token_ids: np.ndarray,
        num_tokens: int,
        finish_reason: str,
        reward: float | None,
        full_reward: float,
        verdict: str | None,
    ) -> bool:
        """False, and nothing is counted, if that sample was there already."""
        self._grow(index)
        byte, bit = index * self._row_bytes + sample // 8, 1 << sample % 8
        if self._done[byte] & bit:
            return False
        self._done[byte] |= bit
        self._digests[index] = _digest(prompt_token_ids)
        self.num_samples += 1
        self.num_tokens += num_tokens
        self.finish_reasons[finish_reason] += 1
        if verdict is not None:
            self.verdicts[verdict] += 1
        if reward is not None:
            self.reward_sum += reward
            self._scored[index] += 1
            self._solved[index] += passes(reward, full_reward)
        return True

    def recount(self, rows: Iterable[Mapping[str, Any]], full_reward: Callable[[int], float]) -> int:
        """Add what an output holds already; the number of its newest attempt, 0 if it is empty. `full_reward` is of
        the prompt of that row of the source."""
        attempt = 0
        for row in rows:
            attempt = max(attempt, row["attempt"])
            index = int(row["prompt_id"].rpartition("_")[2])
            self.add(
                index,
                row["sample"],
                prompt_token_ids=np.array(row["prompt_token_ids"], np.int32),
                num_tokens=len(row["token_ids"]),
                finish_reason=row["finish_reason"],
                reward=row["reward"],
                full_reward=full_reward(index),
                verdict=row["verdict"],
            )
        return attempt

    def missing(self, prompt: Prompt) -> tuple[int, ...]:
        """Samples of `prompt` that are not there. Raises ConfigError if those that are there are of another prompt."""
        if prompt.index >= len(self._digests) or not self._digests[prompt.index]:
            return tuple(range(self._n))
        if self._digests[prompt.index] != _digest(prompt.token_ids):
            raise ConfigError(
                f"cannot resume: prompt {prompt.index} is not the one that the output has samples of; "
                "restore the prompt file (or the tokenizer), or choose another --out"
            )
        start = prompt.index * self._row_bytes
        bits = int.from_bytes(self._done[start : start + self._row_bytes], "little")
        return tuple(sample for sample in range(self._n) if not bits >> sample & 1)

    def summary(self) -> dict[str, Any]:
        digests = np.frombuffer(self._digests, np.uint32)
        figures: dict[str, Any] = {
            "prompts": int((digests != 0).sum()),
            "samples": self.num_samples,
            "tokens": self.num_tokens,
            "response_length_mean": self.num_tokens / max(self.num_samples, 1),
            "finish_reasons": dict(sorted(self.finish_reasons.items())),
        }
        if self.verdicts:
            figures["verdicts"] = dict(sorted(self.verdicts.items()))
        scored, solved = np.frombuffer(self._scored, np.uint16), np.frombuffer(self._solved, np.uint16)
        if scored.any():
            rates = solved[scored > 0] / scored[scored > 0]
            whole = solved[scored == self._n]
            figures["reward_mean"] = self.reward_sum / int(scored.sum())
            figures["pass_rate"] = float(rates.mean())
            figures["solved_never"] = float((rates == 0).mean())
            figures["solved_sometimes"] = float(((rates > 0) & (rates < 1)).mean())
            figures["solved_always"] = float((rates == 1).mean())
            if self._n <= 64:
                counts = np.bincount(whole, minlength=self._n + 1)
                figures["prompts_by_times_solved"] = {str(k): int(count) for k, count in enumerate(counts)}
        return figures

    def _grow(self, index: int) -> None:
        missing = index + 1 - len(self._digests)
        if missing > 0:
            self._done.extend(bytes(missing * self._row_bytes))
            self._digests.frombytes(bytes(4 * missing))
            self._scored.frombytes(bytes(2 * missing))
            self._solved.frombytes(bytes(2 * missing))


def _digest(token_ids: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(token_ids, np.int32).tobytes()) or 1
