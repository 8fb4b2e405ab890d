"""When a verifier ends a run: failing at all it is asked, from the start, it would starve it for hours. Pure policy.

One that has judged anything in this attempt never does: it may fail for a while, as what it asks may be down, and costs
the samples that it fails at.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from olmorl.config.data_sections import RewardSection
from olmorl.controller.group import Group

LEAST_GROUPS = 8  # fewer may be bad rows
WHAT_TO_DO = (  # in a run
    "Mend it or name another (`olmorl doctor CONFIG` tries it on rows), then --resume. The first traceback is in "
    "driver.log among the logs"
)


class FailingVerifiers:
    """Counts, for each data source, groups whose samples all ended in an error."""

    def __init__(self, section: RewardSection, *, groups_per_batch: int) -> None:
        """A batch's worth of such groups is enough, but no fewer than LEAST_GROUPS."""
        self._section = section
        self._enough = max(groups_per_batch, LEAST_GROUPS)
        self._failed: Counter[str] = Counter()
        self._judging: set[str] = set()
        self.trouble: str | None = None
        """set for good when a source has enough of them and has had no other verdict"""

    def judged(self, group: Group) -> None:
        source, failed = group.prompt.data_source, has_failed([group])
        if failed is None or source in self._judging:
            return
        if not failed:
            self._judging.add(source)
            return
        self._failed[source] += 1
        if self._failed[source] == self._enough and self.trouble is None:
            what = f"all samples of the first {self._enough} groups of data source {source!r}"
            self.trouble = f"{describe(what, group, self._section)}. {WHAT_TO_DO}"


def has_failed(groups: Iterable[Group]) -> bool | None:
    """Did every verdict on their samples end in an error? None: there is none, for engines gave up all of them."""
    verdicts = {s.verdict for group in groups for s in group.samples if s.sample.finish_reason != "abort"}
    return verdicts == {"error"} if verdicts else None


def failing_set(name: str, groups: Sequence[Group], section: RewardSection) -> str | None:
    """What to say of an evaluation set without one verdict but errors; None if there is another."""
    if not has_failed(groups):
        return None
    group = next(group for group in groups if has_failed([group]))
    return describe(f"all {sum(len(g.samples) for g in groups)} samples of evaluation set {name!r}", group, section)


def first_failing(sets: Iterable[tuple[str, Sequence[Group]]], section: RewardSection) -> str | None:
    """What to say of the first of such sets."""
    return next(filter(None, (failing_set(name, groups, section) for name, groups in sets)), None)


def describe(what: str, group: Group, section: RewardSection) -> str:
    """One of the failed groups speaks for all."""
    prompt = group.prompt
    names = [check.verifier or "" for check in prompt.checks]
    given = section.verifier is not None and set(names) <= set(section.verifier)
    who = ", ".join(section.remap.get(name, name) for name in names) + (" (reward.verifier)" if given else "")
    if prompt.environment:
        who = f"{prompt.environment} (environment), {who}"
    detail = next(s.detail for s in group.samples if s.sample.finish_reason != "abort")
    return (
        f"the verifier fails: {what} ended in an error and none was ever judged. {who}, asked "
        f"about {prompt.place or prompt.prompt_id}: {detail}"
    )
