"""When the data cannot fill a batch: how long to try, how fast, and what to say. Pure policy, no clock.

Time is counted in groups, so that it means the same on any machine: a batch's worth is as many groups as a batch
holds. Trying goes on at full speed for half the patience, then admission pauses longer and longer.
"""

from collections import Counter

from olmorl.controller.group import Group

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.25, 30.0


class Starvation:
    def __init__(self, *, groups_per_batch: int, patience: int) -> None:
        """`patience`: batches' worth of groups that may come without filling one."""
        self._groups_per_batch = groups_per_batch
        self._patience = patience
        self._paused_at = 0  # batches' worth for which a pause was made
        self._seen: Counter[str] = Counter()
        self._wasted: Counter[str] = Counter()  # groups without signal, by data source
        self._said = ""  # by a verifier, of the newest sample without a score

    def offered(self, group: Group) -> None:
        """A group was judged and a batch is not full yet."""
        kind = _describe(group)
        self._seen[kind] += 1
        if kind != SIGNAL:
            self._wasted[group.prompt.data_source] += 1
            self._said = next((s.detail for s in group.samples if s.reward is None and s.detail), self._said)

    def filled(self) -> None:
        """There is a batch: counting begins anew."""
        self._seen.clear()
        self._wasted.clear()
        self._paused_at, self._said = 0, ""

    @property
    def exhausted(self) -> bool:
        return self._batches_offered >= self._patience

    def next_pause(self) -> float:
        """Seconds to wait before the next admission; each pause is handed out once."""
        tried = self._batches_offered
        first = -(-self._patience // 2)
        if tried < max(first, 1) or tried <= self._paused_at:
            return 0.0
        self._paused_at = tried
        return min(FIRST_PAUSE_SECONDS * 2.0 ** min(tried - first, 30), LONGEST_PAUSE_SECONDS)

    def describe(self) -> str:
        """What came in place of a batch, and from where."""
        if not self._seen:
            return "no group came"
        kinds = ", ".join(f"{count} {kind}" for kind, count in self._seen.most_common())
        sources = ", ".join(f"{source} {count}" for source, count in self._wasted.most_common(3))
        return (
            f"of the last {self._seen.total()} groups: {kinds}"
            + (f" (without signal: {sources})" if sources else "")
            + (f"; the last sample without a score: {self._said}" if self._said else "")
        )

    @property
    def _batches_offered(self) -> int:
        return self._seen.total() // self._groups_per_batch


SIGNAL = "with signal"


def _describe(group: Group) -> str:
    if group.has_signal:
        return SIGNAL
    verdicts = Counter(s.verdict for s in group.samples if s.reward is None)
    if 2 * verdicts.total() >= len(group.samples):
        return f"mostly without a score ({verdicts.most_common(1)[0][0]})" if verdicts else "empty"
    reward = next(s.reward for s in group.samples if s.reward is not None)
    return "all right" if group.prompt.is_passed_by(reward) else "all wrong" if reward <= 0 else "all alike"
