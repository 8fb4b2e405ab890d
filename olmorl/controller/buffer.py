"""The result queue: slots bound the work in hand, a window bounds its age.

A group holds a slot from admission until the weights it helped to make are live, or until it is dropped. With B groups
a batch and k asynchronous steps there are (k + 1) * B slots. Slots alone do not bound age: while others churn, a slow
group can be overtaken for ever. So a batch may leave for training at version v only if no group left behind could
end up trained more than W versions after its admission (docs/staleness.md has the proof). Pure policy: no clock, no
asyncio, no Ray, so that it is simulated and tested as it is.
"""

from collections import deque

from olmorl.controller.group import Group, State
from olmorl.data.prompt import Prompt


class RolloutBuffer:
    def __init__(
        self, *, groups_per_batch: int, async_steps: int, window: int, max_overtaken: int | None = None
    ) -> None:
        """`max_overtaken`: older groups under way that a batch may leave behind; None is any number."""
        assert window >= async_steps >= 0 and groups_per_batch >= 1, (groups_per_batch, async_steps, window)
        self.groups_per_batch = groups_per_batch
        self.window = window
        self.max_overtaken = max_overtaken
        self.num_slots = (async_steps + 1) * groups_per_batch
        self._groups: dict[int, Group] = {}  # by order of admission; exactly the groups that hold a slot
        self._left_empty: dict[int, int] = {}  # by the version it makes: slots that a partial batch does not fill
        self._waiting: deque[Group] = deque()
        self._next_order = 0

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def groups(self) -> list[Group]:
        """Every group that holds a slot, oldest admission first."""
        return list(self._groups.values())

    def has_free_slot(self) -> bool:
        return len(self._groups) + sum(self._left_empty.values()) < self.num_slots

    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def has_enough_finished(self) -> bool:
        return self.count(State.FINISHED) >= self.groups_per_batch

    def count(self, *states: State) -> int:
        return sum(g.state in states for g in self._groups.values())

    def admit(self, prompt: Prompt, *, version: int, seed: int, now: float) -> Group:
        assert self.has_free_slot(), "admit() without a free slot"
        group = Group(prompt=prompt, order=self._next_order, admitted_version=version, seed=seed, t_admitted=now)
        self._next_order += 1
        self._groups[group.order] = group
        self._waiting.append(group)
        return group

    def restore(self, groups: list[Group], *, version: int) -> None:
        """Give finished groups of an earlier attempt their slots back; `version` is trained next.

        They keep the version that they were admitted at, so that the window counts from there. Only before the first
        admission.
        """
        assert not self._groups and len(groups) <= self.num_slots, f"{len(groups)} groups for {self.num_slots} slots"
        for group in groups:
            group.order, self._next_order = self._next_order, self._next_order + 1
            self._groups[group.order] = group
            self._expect(group, State.FINISHED)
        late = self.straggler(version - 1, [])
        assert late is None, f"{late and late.prompt.prompt_id} may not have been left behind at version {version - 1}"

    def claim(self) -> Group | None:
        """Hand out the oldest waiting group to be rolled out."""
        if not self._waiting:
            return None
        group = self._waiting.popleft()
        group.state = State.RUNNING
        return group

    def finish(self, group: Group) -> None:
        self._expect(group, State.RUNNING)
        group.state = State.FINISHED

    def drop(self, group: Group) -> None:
        """A finished group that will not be trained: its slot is free at once."""
        self._expect(group, State.FINISHED, State.TAKEN)
        del self._groups[group.order]

    def take_batch(self, version: int, *, partial: bool = False) -> list[Group] | None:
        """The batch to train at `version`: the oldest finished groups, or None while there are too few or while
        taking them would leave a straggler to grow too old. A partial one is as many as there are, and holds the slots
        of a whole one: else more would be admitted at one version than the window lets be trained."""
        batch, overtaken = self._oldest_finished()
        if len(batch) < (1 if partial else self.groups_per_batch) or self.straggler(version, batch) is not None:
            return None
        for group in overtaken:
            group.overtaken = True
        for group in batch:
            assert version - group.admitted_version <= self.window, (version, group.admitted_version, self.window)
            group.state = State.TAKEN
        if partial:
            self._left_empty[version + 1] = self.groups_per_batch - len(batch)
        return batch

    def _oldest_finished(self) -> tuple[list[Group], list[Group]]:
        """At most a batch of finished groups, and the older ones under way that it would overtake."""
        batch: list[Group] = []
        behind: list[Group] = []
        num_overtaken = 0
        for group in self._groups.values():
            if group.state is State.FINISHED:
                batch.append(group)
                num_overtaken = len(behind)
            elif group.state in (State.WAITING, State.RUNNING):
                behind.append(group)
            too_many = self.max_overtaken is not None and len(behind) > self.max_overtaken
            if too_many or len(batch) == self.groups_per_batch:
                break
        return batch, behind[:num_overtaken]

    def straggler(self, version: int, batch: list[Group]) -> Group | None:
        """The oldest group that `batch` may not leave behind at `version`, if there is one.

        Of the untrained groups left behind, those admitted at or before version + 1 - W + j can be trained at
        version + 1 + j at the latest, so at most (j + 1) * B of them may be there, for each j >= -1.
        """
        taken = {g.order for g in batch}
        left = [
            g
            for g in self._groups.values()
            if g.order not in taken and g.state in (State.WAITING, State.RUNNING, State.FINISHED)
        ]
        for count, group in enumerate(sorted(left, key=lambda g: (g.admitted_version, g.order)), start=1):
            j = group.admitted_version - (version + 1 - self.window)
            if count > max(0, j + 1) * self.groups_per_batch:
                return left[0]
        return None

    def trained(self, batch: list[Group], *, made_version: int) -> None:
        for group in batch:
            self._expect(group, State.TAKEN)
            group.state = State.TRAINED
            group.trained_version = made_version

    def release(self, live_version: int) -> None:
        """Weights up to `live_version` serve everywhere: free the slots of the groups that made them."""
        for group in self.groups:
            if group.trained_version is not None and group.trained_version <= live_version:
                del self._groups[group.order]
        self._left_empty = {made: empty for made, empty in self._left_empty.items() if made > live_version}

    def outstanding(self) -> list[Group]:
        """Groups with no terminal fate yet, oldest first: what a checkpoint must re-issue."""
        return [g for g in self._groups.values() if g.state is not State.TRAINED]

    def _expect(self, group: Group, *states: State) -> None:
        assert self._groups.get(group.order) is group and group.state in states, (
            f"group {group.prompt.prompt_id} is {group.state}, expected {' or '.join(states)}"
        )
