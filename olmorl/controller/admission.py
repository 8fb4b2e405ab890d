"""Whether a finished group is trained, and the advantage and fate of each of its samples. Pure policy."""

import numpy as np

from olmorl.contract.training import TrainSample
from olmorl.controller.advantage import Kind, advantages, carries_signal
from olmorl.controller.group import Fate, Group, ScoredSample


def judge(group: Group, *, scale: float, kind: Kind, mask_truncated: bool) -> bool:
    """Set advantage and fate of every sample; True if the group carries signal and may be trained.

    A sample without a score is not a zero: it leaves the group, and the others are compared among themselves.
    """
    scored = [s for s in group.samples if s.reward is not None]
    for s in group.samples:
        if s.reward is None:
            s.fate = Fate.ABORTED if s.sample.finish_reason == "abort" else Fate.ERROR
    rewards = [scale * s.reward for s in scored if s.reward is not None]
    if not carries_signal(rewards):
        for s in scored:
            s.fate = Fate.ZERO_VARIANCE
        return False
    for s, advantage in zip(scored, advantages(rewards, kind=kind), strict=True):
        s.advantage = float(advantage)
        masked = mask_truncated and s.sample.finish_reason == "length"
        s.fate = Fate.TRUNCATED if masked else Fate.TRAINED
    return True


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
        loss_mask=np.ones(len(sample.token_ids), np.bool_),
        advantage=scored.advantage,
    )


def token_versions(scored: ScoredSample) -> np.ndarray:
    """[T] int32: the policy version that drew each token."""
    versions = np.empty(len(scored.sample.token_ids), np.int32)
    for version, start, end in scored.sample.version_spans:
        versions[start:end] = version
    return versions
