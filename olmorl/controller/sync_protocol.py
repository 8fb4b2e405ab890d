"""How an update reaches every engine although any of them may die, hang or come late: the protocol, pure.

No clock, no I/O: events come in with the time they happened at, commands go out, and the driver carries them out
(`sync.py`). One attempt at one version runs at a time:

    IDLE ──offer / newcomer──► FORMING ──all joined──► SENDING ──sent and all staged──► COMMITTING ──► IDLE
                                  ▲                      │ failure or deadline
                                  └──── RESETTING ◄────────┘   (in FORMING too)

The group is formed anew, as a new epoch, whenever its members change or it broke; events of older epochs are ignored.
A failure seen by one member says little about who caused it, so all are reset: each drops what is half open and
answers, and whoever does not answer is evicted. Versions may be skipped: what is sent is the newest on offer. The
sender holds one version at a time: before it gathers the next one it withdraws the offer and waits for IDLE, so that
no transfer meets a gather.
An engine serves only what it committed itself; a newcomer is stale until then.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

SENDER = "sender"


class Phase(StrEnum):
    IDLE = "idle"
    FORMING = "forming"
    SENDING = "sending"
    RESETTING = "resetting"
    COMMITTING = "committing"


@dataclass(frozen=True, slots=True)
class Join:
    """All members, the sender first, enter the group of `epoch`."""

    epoch: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """The sender broadcasts `version`, the engines stage it."""

    epoch: int
    version: int
    engines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    engine: str
    version: int


@dataclass(frozen=True, slots=True)
class Discard:
    """The engine serves this version already: what it staged is of no use."""

    engine: str
    version: int


@dataclass(frozen=True, slots=True)
class Reset:
    """Leave the group of `epoch`, drop what is half open, and say so: the answer shows who is still there."""

    member: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Evict:
    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class Live:
    """Every engine that is left serves `version`."""

    version: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The sender itself is lost, or transfers keep failing without a culprit."""

    reason: str


Command = Join | Transfer | Commit | Discard | Reset | Evict | Live | GiveUp


@dataclass(frozen=True, slots=True)
class Wait:
    """Who is waited for, and for what, since when."""

    member: str
    what: str
    since: float


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds each phase may last."""

    form: float = 60.0
    send: float = 120.0
    commit: float = 60.0
    reset: float = 10.0

    def of(self, phase: Phase) -> float:
        return {
            Phase.FORMING: self.form,
            Phase.SENDING: self.send,
            Phase.COMMITTING: self.commit,
            Phase.RESETTING: self.reset,
        }[phase]


class SyncProtocol:
    def __init__(self, *, deadlines: Deadlines, max_attempts: int = 3) -> None:
        self.phase = Phase.IDLE
        self.epoch = 0
        self.offered: int | None = None
        """the version the sender holds; None while it gathers the next one"""
        self.serving: dict[str, int] = {}
        """engine -> version it committed; one that is stale is missing here"""
        self.live_version: int | None = None
        self._engines: list[str] = []
        self._newest = -1  # ever offered
        self._deadlines = deadlines
        self._max_attempts = max_attempts
        self._group: tuple[str, ...] | None = None  # engines of the group that stands, None if none does
        self._attempt = 0
        self._missing: set[str] = set()  # members that have not done what this phase waits for
        self._targets: set[str] = set()  # engines that have not committed the version under way
        self._suspects: set[str] = set()  # engines to do without if attempts keep failing
        self._version = -1  # under way
        self._since = 0.0

    @property
    def engines(self) -> tuple[str, ...]:
        return tuple(self._engines)

    @property
    def deadline(self) -> float | None:
        """When `tick` has something to do, if nothing happens before."""
        return None if self.phase is Phase.IDLE else self._since + self._deadlines.of(self.phase)

    def waiting(self) -> list[Wait]:
        what = {
            Phase.FORMING: f"to join epoch {self.epoch}",
            Phase.SENDING: f"to send or stage version {self._version}",
            Phase.COMMITTING: f"to commit version {self._version}",
            Phase.RESETTING: "to answer a reset",
        }
        return [Wait(member, what[self.phase], self._since) for member in sorted(self._missing)]

    # What happens. Each returns what is to be done now.

    def add(self, engine: str, *, now: float) -> list[Command]:
        """A newcomer, stale until it committed the offered version."""
        assert engine != SENDER and engine not in self._engines, f"{engine} is a member already"
        self._engines.append(engine)
        return self._proceed(now)

    def offer(self, version: int, *, now: float) -> list[Command]:
        """The sender holds `version` from now on."""
        assert version > self._newest, f"version {version} was offered after {self._newest}"
        self.offered = self._newest = version
        return self._proceed(now)

    def withdraw(self) -> None:
        """The sender is about to gather the next version: no transfer begins before the next offer. One may be under
        way: the gather begins when the phase is IDLE."""
        self.offered = None

    def lost(self, member: str, reason: str, *, now: float) -> list[Command]:
        """The process of `member` is known to be gone."""
        if member == SENDER:
            return [GiveUp(f"the sender is lost: {reason}")]
        if member not in self._engines:
            return []
        commands = self._evict([member], reason)
        if self.phase in (Phase.FORMING, Phase.SENDING):
            return commands + self._reset(now)
        self._missing.discard(member)
        self._targets.discard(member)
        return commands + self._after_answer(now)

    def joined(self, member: str, *, epoch: int, now: float) -> list[Command]:
        if not self._expected(Phase.FORMING, member, epoch):
            return []
        self._missing.discard(member)
        return self._after_answer(now)

    def sent(self, *, epoch: int, now: float) -> list[Command]:
        return self._transferred(SENDER, epoch, now)

    def staged(self, engine: str, *, epoch: int, now: float) -> list[Command]:
        return self._transferred(engine, epoch, now)

    def failed(self, member: str, *, epoch: int, now: float) -> list[Command]:
        """`member` is alive and says that joining or transferring failed; whose fault it was is not known."""
        if epoch != self.epoch or self.phase not in (Phase.FORMING, Phase.SENDING):
            return []
        return self._reset(now)

    def was_reset(self, member: str, *, epoch: int, now: float) -> list[Command]:
        if not self._expected(Phase.RESETTING, member, epoch):
            return []
        self._missing.discard(member)
        return self._after_answer(now)

    def committed(self, engine: str, *, version: int, now: float) -> list[Command]:
        if self.phase is not Phase.COMMITTING or version != self._version or engine not in self._missing:
            return []
        self._missing.discard(engine)
        self._targets.discard(engine)
        self.serving[engine] = version
        return self._after_answer(now)

    def refused(self, engine: str, reason: str, *, version: int, now: float) -> list[Command]:
        """`engine` would not commit what it staged: it keeps its old weights, which nobody may ask it for."""
        if self.phase is not Phase.COMMITTING or version != self._version or engine not in self._missing:
            return []
        return self.lost(engine, f"refused version {version}: {reason}", now=now)

    def tick(self, *, now: float) -> list[Command]:
        deadline = self.deadline
        if deadline is None or now < deadline:
            return []
        late = sorted(self._missing)
        seconds = self._deadlines.of(self.phase)
        if self.phase in (Phase.FORMING, Phase.SENDING):
            return self._reset(now)
        if SENDER in late:
            return [GiveUp(f"the sender did not answer a reset within {seconds:g} s")]
        what = "answer a reset" if self.phase is Phase.RESETTING else f"commit version {self._version}"
        commands = self._evict(late, f"did not {what} within {seconds:g} s")
        self._missing.clear()
        self._targets.difference_update(late)
        return commands + self._after_answer(now)

    # How it goes on.

    def _expected(self, phase: Phase, member: str, epoch: int) -> bool:
        return self.phase is phase and epoch == self.epoch and member in self._missing

    def _transferred(self, member: str, epoch: int, now: float) -> list[Command]:
        if not self._expected(Phase.SENDING, member, epoch):
            return []
        self._missing.discard(member)
        return self._after_answer(now)

    def _enter(self, phase: Phase, missing: Iterable[str], now: float) -> None:
        self.phase, self._missing, self._since = phase, set(missing), now

    def _after_answer(self, now: float) -> list[Command]:
        """One less is missing; when nobody is, the next phase begins."""
        if self.phase is Phase.IDLE:
            return self._proceed(now)
        if self._missing:
            return []
        if self.phase is Phase.FORMING:
            return self._transfer(now)
        if self.phase is Phase.SENDING:
            return self._commit(now)
        if self.phase is Phase.RESETTING:
            return self._try_again(now)
        return self._finish(now)

    def _proceed(self, now: float) -> list[Command]:
        """When idle: bring the offered version to whoever lacks it."""
        if self.phase is not Phase.IDLE or self.offered is None or not self._engines:
            return []
        if all(self.serving.get(engine) == self.offered for engine in self._engines):
            return []
        self._attempt = 1
        return self._transfer(now) if self._group == self.engines else self._form(now)

    def _form(self, now: float) -> list[Command]:
        self.epoch += 1
        self._group = self.engines
        self._enter(Phase.FORMING, (SENDER, *self._engines), now)
        return [Join(self.epoch, (SENDER, *self._engines))]

    def _transfer(self, now: float) -> list[Command]:
        assert self._group is not None, "nobody to send to"
        if self.offered is None:
            self.phase = Phase.IDLE
            return []
        self._version = self.offered
        self._targets = {engine for engine in self._group if self.serving.get(engine) != self._version}
        self._enter(Phase.SENDING, (SENDER, *self._group), now)
        return [Transfer(self.epoch, self._version, self._group)]

    def _commit(self, now: float) -> list[Command]:
        assert self._group is not None, "staged without a group"
        spared: list[Command] = [Discard(e, self._version) for e in self._group if e not in self._targets]
        self._enter(Phase.COMMITTING, self._targets, now)
        return spared + [Commit(engine, self._version) for engine in sorted(self._targets)]

    def _finish(self, now: float) -> list[Command]:
        self.phase = Phase.IDLE
        commands: list[Command] = []
        if self._engines and all(self.serving.get(engine) == self._version for engine in self._group_left()):
            self.live_version = self._version
            commands.append(Live(self._version))
        return commands + self._proceed(now)

    def _group_left(self) -> list[str]:
        return [engine for engine in self._engines if self._group is not None and engine in self._group]

    def _reset(self, now: float) -> list[Command]:
        """The attempt failed: drop what is half open, and see who is still there."""
        self._suspects = self._suspected()
        self._group = None
        members = (SENDER, *self._engines)
        self._enter(Phase.RESETTING, members, now)
        return [Reset(member, self.epoch) for member in members]

    def _suspected(self) -> set[str]:
        """Newcomers, for before they came updates went well; else who has nothing staged. Nobody where no group forms
        from the first."""
        late = self._missing - {SENDER}
        newcomers = late - self.serving.keys() if self.serving else set()
        return newcomers or (late if self.phase is Phase.SENDING else set())

    def _try_again(self, now: float) -> list[Command]:
        commands: list[Command] = []
        if self._attempt >= self._max_attempts:
            culprits = sorted(self._suspects.intersection(self._engines))
            if not culprits:
                return [GiveUp(f"version {self._newest} could not be sent in {self._attempt} attempts")]
            commands = self._evict(culprits, f"did not join and stage what was sent in {self._attempt} attempts")
        self._attempt += 1
        if not self._engines or self.offered is None:
            self.phase = Phase.IDLE
            return commands
        return commands + self._form(now)

    def _evict(self, engines: Iterable[str], reason: str) -> list[Command]:
        commands: list[Command] = []
        for engine in engines:
            self._engines.remove(engine)
            self.serving.pop(engine, None)
            commands.append(Evict(engine, reason))
            self._attempt = 0  # whoever made attempts fail may be gone with it
        return commands
