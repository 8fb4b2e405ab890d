"""Rollouts of a step, group by group, with the text of each token: for the page and for `olmorl inspect`."""

import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from olmorl.dashboard.run_data import RunData
from olmorl.metrics.rollout_log import RolloutRow, read_rollouts


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """Text of single tokens. A token that is part of a character shows as its bytes' place holder."""

    tokenizer: Tokenizer | None

    def pieces(self, token_ids: np.ndarray) -> list[str]:
        if self.tokenizer is None:
            return [f"⟨{token}⟩" for token in token_ids]
        return [self.tokenizer.decode([int(token)], skip_special_tokens=False) for token in token_ids]

    def text(self, token_ids: np.ndarray) -> str:
        if self.tokenizer is None:
            return " ".join(map(str, token_ids))
        return str(self.tokenizer.decode([int(token) for token in token_ids], skip_special_tokens=False))


@lru_cache(maxsize=4)
def token_texts(directory: Path) -> TokenTexts:
    """From the run's export, else from the model its config names; without either, ids stand for texts."""
    folders = sorted((directory / "export").glob("step_*"), reverse=True)
    config = directory / "config.toml"
    if config.exists():
        folders.append(Path(tomllib.loads(config.read_text())["model"]["path"]))
    for folder in folders:
        for place in (folder / "tokenizer.json", directory.parent.parent / folder / "tokenizer.json"):
            if place.exists():
                return TokenTexts(Tokenizer.from_file(str(place)))
    return TokenTexts(None)


def step_groups(run: RunData, step: int) -> list[dict[str, Any]]:
    """The groups of a step: the prompt and its ground truth, and each sample with its tokens, and of each token the
    logprob, policy version and importance ratio."""
    texts = token_texts(run.directory)
    groups: dict[str, dict[str, Any]] = {}
    for row in read_rollouts(run.rollouts_file(step)):
        group = groups.setdefault(
            row.prompt_id,
            {
                "prompt_id": row.prompt_id,
                "source": row.data_source,
                "prompt": texts.text(row.prompt_token_ids),
                "ground_truth": row.ground_truth,
                "samples": [],
            },
        )
        group["samples"].append(_sample(row, texts))
    for group in groups.values():
        group["samples"].sort(key=lambda sample: sample["sample"])
        group["mean_reward"] = mean_reward([s["reward"] for s in group["samples"]])
    return list(groups.values())


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
    ratios = np.exp(np.clip(row.learner_logprobs - row.logprobs, -20.0, 20.0))
    return [round(float(ratio), 4) if np.isfinite(ratio) else None for ratio in ratios]


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
        "logprobs": [round(float(x), 4) for x in row.logprobs],
        "versions": versions_of(row),
        "ratios": ratios_of(row),
    }
