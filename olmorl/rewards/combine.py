"""Several verdicts on one completion become one."""

from collections.abc import Sequence

from olmorl.rewards.verdict import Status, Verdict, scored

GRAVEST_FIRST: tuple[Status, ...] = ("error", "timeout", "unscorable")


def combine(verdicts: Sequence[Verdict], weights: Sequence[float], *, names: Sequence[str]) -> Verdict:
    """The weighted sum. If any part has no score, the sum is not known: the gravest status is that of the whole."""
    assert len(verdicts) == len(weights) == len(names) > 0, "a weight and a name for each verdict"
    if len(verdicts) == 1 and weights[0] == 1.0:
        return verdicts[0]
    for status in GRAVEST_FIRST:
        for name, verdict in zip(names, verdicts, strict=True):
            if verdict.status == status:
                return Verdict(status=status, detail=f"{name}: {verdict.detail}")
    rewards = [verdict.reward or 0.0 for verdict in verdicts]
    detail = ", ".join(
        f"{name} {reward:g}" + (f" ({verdict.detail})" if verdict.detail else "")
        for name, reward, verdict in zip(names, rewards, verdicts, strict=True)
    )
    return scored(sum(w * r for w, r in zip(weights, rewards, strict=True)), detail)
