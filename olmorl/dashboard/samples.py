"""Rollouts of a step, group by group, with the text of each token: for the page and for `olmorl inspect`."""

import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from olmorl.dashboard.run_data import RolloutsOf, RunData
from olmorl.metrics.rollout_log import ROLLOUT_SCHEMA, RolloutRow, read_rollouts


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """Text of single tokens. A token that is part of a character shows as its bytes' place holder."""

    tokenizer: Tokenizer | None

    def pieces(self, token_ids: np.ndarray) -> list[str]:
        distinct, places = np.unique(token_ids, return_inverse=True)
        if self.tokenizer is None:
            texts = [f"⟨{token}⟩" for token in distinct]
        else:
            texts = [self.tokenizer.decode([int(token)], skip_special_tokens=False) for token in distinct]
        return [texts[place] for place in places]

    def text(self, token_ids: np.ndarray) -> str:
        if self.tokenizer is None:
            return " ".join(map(str, token_ids))
        return str(self.tokenizer.decode([int(token) for token in token_ids], skip_special_tokens=False))


def token_texts(directory: Path) -> TokenTexts:
    """From the run's export, else from the model its config names; without either, ids stand for texts."""
    folders = sorted((directory / "export").glob("step_*"), reverse=True)
    config = directory / "config.toml"
    if config.exists():
        folders.append(Path(tomllib.loads(config.read_text())["model"]["path"]))
    for folder in folders:
        for place in (folder / "tokenizer.json", directory.parent.parent / folder / "tokenizer.json"):
            if place.exists():
                return TokenTexts(_tokenizer(str(place)))
    return TokenTexts(None)


@lru_cache(maxsize=4)
def _tokenizer(path: str) -> Tokenizer:
    return Tokenizer.from_file(path)


def step_groups(run: RunData, step: int, of: RolloutsOf = "rollouts") -> list[dict[str, Any]]:
    """The groups of a step without what their samples hold: of a long step that is gigabytes."""
    rewards: dict[str, list[float | None]] = {}
    prompts: dict[str, str] = {}
    for row in _columns(run.rollouts_file(step, of), "prompt_id", "prompt", "reward"):
        rewards.setdefault(row["prompt_id"], []).append(row["reward"])
        prompts.setdefault(row["prompt_id"], (row["prompt"] or "")[:120])
    return [
        {"prompt_id": name, "prompt": prompts[name], "num_samples": len(of_group), "mean_reward": mean_reward(of_group)}
        for name, of_group in rewards.items()
    ]


def read_group(run: RunData, step: int, prompt_id: str, of: RolloutsOf = "rollouts") -> dict[str, Any]:
    """One group: the prompt and its ground truth; each sample with its tokens; and of each token the logprob, policy
    version and importance ratio. Raises LookupError: the step has no such group."""
    rows = sorted(read_rollouts(run.rollouts_file(step, of), prompt_id=prompt_id), key=lambda row: row.sample)
    if not rows:
        raise LookupError(f"no prompt {prompt_id!r} in step {step}")
    texts = token_texts(run.directory)
    return {
        "prompt_id": prompt_id,
        "source": rows[0].data_source,
        "prompt": texts.text(rows[0].prompt_token_ids),
        "ground_truth": rows[0].ground_truth,
        "mean_reward": mean_reward([row.reward for row in rows]),
        "samples": [_sample(row, texts) for row in rows],
    }


def mean_reward(rewards: list[float | None]) -> float | None:
    scored = [reward for reward in rewards if reward is not None]
    return sum(scored) / len(scored) if scored else None


def versions_of(row: RolloutRow) -> list[int]:
    """The policy version of each token."""
    return [version for version, start, end in row.version_spans for _ in range(start, end)]


def ratios_of(row: RolloutRow) -> list[float | None]:
    """Of each token the learner's probability over the one it was drawn with; None where no step trained it."""
    if len(row.learner_logprobs) == 0:
        return [None] * len(row.token_ids)
    return _numbers(np.exp(np.clip(row.learner_logprobs - row.logprobs, -20.0, 20.0)))


def _numbers(values: np.ndarray) -> list[float | None]:
    """JSON knows no infinity and no NaN."""
    return [round(float(value), 4) if np.isfinite(value) else None for value in values]


def _sample(row: RolloutRow, texts: TokenTexts) -> dict[str, Any]:
    return {
        "rollout_id": row.rollout_id,
        "sample": row.sample,
        "reward": row.reward,
        "verdict": row.verdict,
        "detail": row.verdict_detail,
        "advantage": row.advantage,
        "fate": row.fate,
        "finish_reason": row.finish_reason,
        "worker": row.worker,
        "tokens": texts.pieces(row.token_ids),
        "logprobs": _numbers(row.logprobs),
        "versions": versions_of(row),
        "ratios": ratios_of(row),
    }


def _columns(path: Path, *names: str) -> list[dict[str, Any]]:
    return pq.read_table(path, columns=list(names), schema=ROLLOUT_SCHEMA).to_pylist()
