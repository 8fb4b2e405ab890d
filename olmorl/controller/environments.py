"""The environments of a run, in processes that can be killed, and their texts as the model's tokens."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerFast

from olmorl.contract.errors import ConfigError
from olmorl.data.prompt import Prompt
from olmorl.environments.registry import environment_path
from olmorl.rewards.pool import VerifierPool
from olmorl.rewards.settings import VerifierSettings
from olmorl.rewards.verdict import Episode, Verdict, VerifierJob


@dataclass(frozen=True, slots=True)
class Rules:
    """How an environment is played."""

    stop: tuple[str, ...]
    """strings that end a turn"""
    max_turns: int


class Environments:
    def __init__(self, pool: VerifierPool, tokenizer: PreTrainedTokenizerFast, rules: dict[str, Rules]) -> None:
        self._pool = pool
        self._tokenizer = tokenizer
        self._rules = rules

    @classmethod
    async def start(
        cls,
        names: Sequence[str],
        *,
        tokenizer: PreTrainedTokenizerFast,
        workers: int,
        timeout_seconds: float,
        settings: VerifierSettings,
    ) -> "Environments":
        """Returns when every process has loaded them. Raises ConfigError when one cannot be, or is none."""
        paths = [environment_path(name) for name in names]
        pool = VerifierPool(paths, workers=workers, timeout_seconds=timeout_seconds, settings=settings)
        await pool.start()
        try:
            asked = [_job(path, Episode((), 0)) for path in paths]
            rules = {
                name: _read_rules(name, verdict) for name, verdict in zip(names, await pool.score(asked), strict=True)
            }
        except BaseException:
            await pool.close()
            raise
        return cls(pool, tokenizer, rules)

    def rules(self, name: str) -> Rules:
        return self._rules[name]

    async def step(self, prompt: Prompt, turns: Sequence[str], *, seed: int) -> Verdict:
        """What follows the last of `turns`: rewards so far and the observation, or why there is none."""
        assert prompt.environment is not None, f"{prompt.prompt_id} names no environment"
        job = _job(
            environment_path(prompt.environment),
            Episode(tuple(turns), seed),
            prompt=prompt.text,
            ground_truth=prompt.checks[0].ground_truth,
        )
        [verdict] = await self._pool.score([job])
        return verdict

    def encode(self, observation: str) -> np.ndarray:
        """[T] int32. Special tokens are read where the text holds them, and none is added."""
        return np.array(self._tokenizer(observation, add_special_tokens=False)["input_ids"], np.int32)

    def decode(self, token_ids: np.ndarray) -> str:
        """The turn as the environment sees it: with its stop string, without special tokens."""
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    async def close(self) -> None:
        await self._pool.close()


def _job(path: str, episode: Episode, *, prompt: str | None = None, ground_truth: object = None) -> VerifierJob:
    return VerifierJob(verifier=path, completion="", ground_truth=ground_truth, prompt=prompt, episode=episode)


def _read_rules(name: str, verdict: Verdict) -> Rules:
    if verdict.observation is None:
        raise ConfigError(f"environment {name!r} cannot be played: {verdict.detail}")
    raw = json.loads(verdict.observation)
    if not all(isinstance(stop, str) and stop for stop in raw["stop"]):
        raise ConfigError(f"environment {name!r}: stop is {raw['stop']!r}; it must be a tuple of non-empty texts")
    if not isinstance(raw["max_turns"], int) or raw["max_turns"] < 1:
        raise ConfigError(f"environment {name!r}: max_turns is {raw['max_turns']!r}; it must be an integer >= 1")
    return Rules(tuple(raw["stop"]), raw["max_turns"])
