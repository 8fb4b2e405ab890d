"""Whether a finished group is trained, and the advantage and fate of each of its samples. Pure policy."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from olmorl.contract.training import TrainSample
from olmorl.controller.advantage import Kind, advantages, carries_signal
from olmorl.controller.group import Fate, Group, ScoredSample

Unscored = Literal["drop_sample", "drop_group", "zero"]
DROP_SAMPLES: Mapping[str, Unscored] = dict.fromkeys(("timeout", "error", "unscorable"), "drop_sample")


def judge(
    group: Group, *, scale: float, kind: Kind, mask_truncated: bool, unscored: Mapping[str, Unscored] = DROP_SAMPLES
) -> bool:
    """Set advantage and fate of every sample; True if the group carries signal and may be trained.

    `unscored` says, by verdict, what a sample without a score means. It is no zero unless that is wished for: it
    leaves the group, and the others are compared among themselves, or the whole group is given up. What an engine
    gave up is no verdict and always leaves the group.
    """
    counted: list[ScoredSample] = []
    rewards: list[float] = []
    give_up = False
    for s in group.samples:
        if s.reward is not None:
            counted.append(s)
            rewards.append(scale * s.reward)
            continue
        assert s.verdict is not None, "a run judges every sample"
        aborted = s.sample.finish_reason == "abort"
        s.fate = Fate.ABORTED if aborted else Fate.ERROR
        action = "drop_sample" if aborted else unscored[s.verdict]
        give_up = give_up or action == "drop_group"
        if action == "zero":
            counted.append(s)
            rewards.append(0.0)
    if give_up or not carries_signal(rewards):
        for s in counted:
            s.fate = Fate.ERROR if give_up else Fate.ZERO_VARIANCE
        return False
    for s, advantage in zip(counted, advantages(rewards, kind=kind), strict=True):
        s.advantage = float(advantage)
        masked = mask_truncated and s.sample.finish_reason == "length"
        s.fate = Fate.TRUNCATED if masked else Fate.TRAINED
    return True


def keep_signal(groups: Sequence[Group], *, at_most: int) -> tuple[list[Group], list[Group]]:
    """Of what was drawn for a step, in order: the first groups with signal, and all others, whose samples that could
    have been trained are surplus."""
    kept = [group for group in groups if group.has_signal][:at_most]
    others = [group for group in groups if group not in kept]
    for group in others:
        for s in group.samples:
            if s.fate in (Fate.TRAINED, Fate.TRUNCATED):
                s.fate = Fate.SURPLUS
    return kept, others


def train_samples(group: Group) -> list[TrainSample]:
    """What the learner sees of a group that is trained."""
    return [_train_sample(group, s) for s in group.samples if s.fate is Fate.TRAINED]


def _train_sample(group: Group, scored: ScoredSample) -> TrainSample:
    sample = scored.sample
    return TrainSample(
        prompt_token_ids=group.prompt.token_ids,
        token_ids=sample.token_ids,
        logprobs=sample.logprobs,
        token_versions=token_versions(scored),
        loss_mask=scored.loss_mask,
        advantage=scored.advantage,
    )


def token_versions(scored: ScoredSample) -> np.ndarray:
    """[T] int32: the policy version that drew each token, OBSERVED where none did."""
    versions = np.empty(len(scored.sample.token_ids), np.int32)
    for version, start, end in scored.sample.version_spans:
        versions[start:end] = version
    return versions
