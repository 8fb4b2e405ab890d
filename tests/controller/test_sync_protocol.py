"""The sync protocol against a world in which members die, hang, answer late, twice or never.

The world is a model of what the workers really do: a group forms when all its members join, a broadcast reaches an
engine only if every member takes part, an engine commits only what it staged. Each drawn schedule decides what goes
wrong and in which order things happen.
"""

import os
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from olmorl.controller.sync_protocol import (
    SENDER,
    Command,
    Commit,
    Deadlines,
    Discard,
    Evict,
    GiveUp,
    Join,
    Live,
    Phase,
    Reset,
    SyncProtocol,
    Transfer,
)

DEADLINES = Deadlines(form=10, send=20, commit=10, reset=5)


@dataclass
class Member:
    """What a process really holds, whatever the protocol believes."""

    fate: str = "well"  # "well", "hung" (takes nothing in, may wake up), "cut off" (from all but the driver) or "dead"
    epoch: int | None = None
    staged: int | None = None
    version: int | None = None


@dataclass
class World:
    protocol: SyncProtocol
    members: dict[str, Member] = field(default_factory=lambda: {SENDER: Member()})
    now: float = 0.0
    inbox: list[tuple] = field(default_factory=list)  # reports on their way to the driver
    work: list[tuple] = field(default_factory=list)  # commands on their way to a member
    joining: dict[int, set[str]] = field(default_factory=dict)
    gathered: int | None = None
    """the version in the sender's buckets"""
    gathering: int | None = None
    """the next one, withdrawn for but not gathered yet"""
    evicted: set[str] = field(default_factory=set)
    live: list[int] = field(default_factory=list)
    gave_up: str | None = None

    def carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Join(epoch, members):
                    self.joining[epoch] = set()
                    self.work += [("join", member, epoch, members) for member in members]
                case Transfer(epoch, version, engines):
                    self.work.append(("transfer", epoch, version, engines))
                case Commit(engine, version):
                    self.work.append(("commit", engine, version))
                case Discard(engine, version):
                    self.work.append(("discard", engine, version))
                case Reset(member, epoch):
                    self.work.append(("reset", member, epoch))
                case Evict(engine, _):
                    assert engine not in self.evicted, f"{engine} was evicted twice"
                    self.evicted.add(engine)
                case Live(version):
                    self.check_live(version)
                case GiveUp(reason):
                    self.gave_up = reason

    def check_live(self, version: int) -> None:
        assert not self.live or version > self.live[-1] or version == self.live[-1], "a live version went back"
        for engine, served in self.protocol.serving.items():
            assert self.members[engine].version == served, f"{engine} is believed to serve {served}"
        self.live.append(version)

    def well(self, name: str) -> bool:
        return self.members[name].fate == "well"

    def perform(self, job: tuple) -> None:
        """One command arrives at its member. A hung or dead member does nothing with it."""
        kind = job[0]
        if kind == "join":
            _, name, epoch, members = job
            if self.well(name):
                self.joining[epoch].add(name)
            elif self.members[name].fate == "cut off":
                self.inbox.append(("failed", name, epoch))
            if self.joining[epoch] == set(members):
                for member in members:
                    self.members[member].epoch = epoch
                    self.inbox.append(("joined", member, epoch))
        elif kind == "transfer":
            _, epoch, version, engines = job
            party = [SENDER, *engines]
            if self.gathered == version and all(self.well(m) and self.members[m].epoch == epoch for m in party):
                self.inbox.append(("sent", epoch))
                for engine in engines:
                    self.members[engine].staged = version
                    self.inbox.append(("staged", engine, epoch))
            else:
                self.inbox += [("failed", m, epoch) for m in party if self.well(m)]
        elif kind == "commit":
            _, name, version = job
            member = self.members[name]
            if not self.well(name):
                return
            if member.staged != version or (member.version is not None and version <= member.version):
                self.inbox.append(("refused", name, version))
                return
            member.version, member.staged = version, None
            self.inbox.append(("committed", name, version))
        elif kind == "discard" and self.well(job[1]):
            if self.members[job[1]].staged == job[2]:
                self.members[job[1]].staged = None
        elif kind == "reset" and self.members[job[1]].fate in ("well", "cut off"):
            member = self.members[job[1]]
            member.staged = None
            if member.epoch is not None and member.epoch <= job[2]:
                member.epoch = None
            self.inbox.append(("was_reset", job[1], job[2]))

    def deliver(self, report: tuple) -> None:
        protocol, now = self.protocol, self.now
        kind = report[0]
        if kind == "joined":
            self.carry_out(protocol.joined(report[1], epoch=report[2], now=now))
        elif kind == "sent":
            self.carry_out(protocol.sent(epoch=report[1], now=now))
        elif kind == "staged":
            self.carry_out(protocol.staged(report[1], epoch=report[2], now=now))
        elif kind == "failed":
            self.carry_out(protocol.failed(report[1], epoch=report[2], now=now))
        elif kind == "was_reset":
            self.carry_out(protocol.was_reset(report[1], epoch=report[2], now=now))
        elif kind == "committed":
            self.carry_out(protocol.committed(report[1], version=report[2], now=now))
        elif kind == "refused":
            self.carry_out(protocol.refused(report[1], "not staged", version=report[2], now=now))
        elif kind == "lost":
            self.carry_out(protocol.lost(report[1], "died", now=now))

    def add(self, name: str) -> None:
        self.members[name] = Member()
        self.carry_out(self.protocol.add(name, now=self.now))

    def begin_gather(self, version: int) -> None:
        """What stands in the sender's buckets may only be written while nobody is sent it."""
        self.protocol.withdraw()
        self.gathering = version

    def next_of_sender(self) -> bool:
        """Gather what is to be gathered, as soon as the protocol rests; then offer it. False if neither can be done."""
        if self.gathering is not None and self.protocol.phase is Phase.IDLE:
            self.gathered, self.gathering = self.gathering, None
        elif self.gathering is None and self.gathered is not None and self.protocol.offered is None:
            self.carry_out(self.protocol.offer(self.gathered, now=self.now))
        else:
            return False
        return True

    def offer(self, version: int) -> None:
        """Gathered and offered without anything in between."""
        self.begin_gather(version)
        assert self.next_of_sender() and self.next_of_sender(), "the protocol was not at rest"

    def settle(self) -> None:
        """No more faults: everything on its way arrives, and deadlines pass, until nothing is left to happen."""
        for name, member in self.members.items():
            if member.fate == "dead" and name not in self.evicted:
                self.inbox.append(("lost", name))
        for _ in range(10_000):
            if self.gave_up is not None:
                return
            if self.work:
                self.perform(self.work.pop(0))
            elif self.inbox:
                self.deliver(self.inbox.pop(0))
            elif self.protocol.deadline is not None:
                self.now = max(self.now, self.protocol.deadline)
                self.carry_out(self.protocol.tick(now=self.now))
            elif not self.next_of_sender():
                return
        raise AssertionError(f"the protocol does not come to rest: {self.protocol.waiting()}")


def run_schedule(data: st.DataObject) -> None:
    world = World(SyncProtocol(deadlines=DEADLINES))
    protocol = world.protocol
    versions = engines = 0
    punctual, disturbed = True, set()  # nothing took long so far; who was ever broken
    for _ in range(data.draw(st.integers(1, 3))):
        world.add(f"engine-{engines}")
        engines += 1
    for _ in range(data.draw(st.integers(5, 60))):
        if world.gave_up is not None:
            break
        moves = ["time", "offer", "add", "break"]
        moves += ["work"] * 4 * bool(world.work) + ["deliver"] * 4 * bool(world.inbox)
        move = data.draw(st.sampled_from(moves))
        if move == "work":
            job = world.work.pop(data.draw(st.integers(0, min(3, len(world.work) - 1))))
            world.perform(job)
        elif move == "deliver":
            report = world.inbox.pop(data.draw(st.integers(0, len(world.inbox) - 1)))
            world.deliver(report)
            if data.draw(st.integers(0, 9)) == 0:  # once more, now or later
                world.inbox.append(report)
        elif move == "time":
            world.now += data.draw(st.sampled_from([0.1, 3.0, 12.0, 25.0]))
            punctual = False
            world.carry_out(protocol.tick(now=world.now))
        elif move == "offer":
            if not world.next_of_sender() and world.gathering is None:
                versions += data.draw(st.integers(1, 2))  # versions may be skipped
                world.begin_gather(versions)
        elif move == "add" and engines < 6:
            world.add(f"engine-{engines}")
            engines += 1
        elif move == "break":
            victims = [n for n in world.members if n not in world.evicted and n != SENDER]
            if victims:
                name = data.draw(st.sampled_from(victims))
                victim = world.members[name]
                disturbed.add(name)
                fate = data.draw(st.sampled_from(["dead", "hung", "well"]))
                if victim.fate != "dead":
                    victim.fate = fate
        check_beliefs(world)
    world.settle()
    check_beliefs(world)
    if punctual:
        assert world.evicted <= disturbed, "an engine that did everything in time was evicted"
    if world.gave_up is None:
        assert protocol.phase is Phase.IDLE
        for engine in protocol.engines:
            assert world.members[engine].staged is None, f"{engine} was left with a half-open update"
        if protocol.offered is not None:
            for engine in protocol.engines:
                assert protocol.serving.get(engine) == protocol.offered, f"{engine} was left behind"
                assert world.members[engine].version == protocol.offered


def check_beliefs(world: World) -> None:
    """An engine never serves less than the driver believes, and more only while a commit is being reported."""
    committing = world.protocol.phase is Phase.COMMITTING
    for engine, version in world.protocol.serving.items():
        served = world.members[engine].version
        assert served is not None and (served > version if committing and served != version else served == version)
    assert not world.evicted.intersection(world.protocol.engines)


QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=500, deadline=None, suppress_health_check=QUIET)
@given(data=st.data())
def test_no_schedule_hangs_or_serves_stale_weights(data: st.DataObject) -> None:
    run_schedule(data)


@pytest.mark.soak
@settings(max_examples=int(os.environ.get("OLMORL_SCHEDULES", "20000")), deadline=None, suppress_health_check=QUIET)
@given(data=st.data())
def test_many_schedules(data: st.DataObject) -> None:
    run_schedule(data)


def quiet_world(num_engines: int) -> World:
    world = World(SyncProtocol(deadlines=DEADLINES))
    for i in range(num_engines):
        world.add(f"engine-{i}")
    return world


def test_a_quiet_update_forms_once_and_goes_live() -> None:
    world = quiet_world(2)
    for version in (0, 1, 2):
        world.offer(version)
        world.settle()
    assert world.live == [0, 1, 2]
    assert world.protocol.epoch == 1
    assert not world.evicted


def test_versions_may_be_skipped() -> None:
    world = quiet_world(1)
    world.offer(0)
    world.begin_gather(3)  # while 0 is being sent
    world.settle()
    assert world.protocol.serving == {"engine-0": 3}


def test_a_newcomer_that_comes_while_the_next_version_is_gathered_waits_for_it() -> None:
    world = quiet_world(1)
    world.offer(0)
    world.settle()
    world.begin_gather(1)
    assert world.next_of_sender() and world.gathered == 1
    world.add("late")
    assert world.work == [], "it would be sent what the sender holds no more"
    world.settle()
    assert world.protocol.serving == {"engine-0": 1, "late": 1} and not world.evicted


def test_a_gather_waits_for_the_transfer_under_way() -> None:
    world = quiet_world(1)
    world.offer(0)
    while world.protocol.phase is Phase.FORMING:
        world.perform(world.work.pop(0)) if world.work else world.deliver(world.inbox.pop(0))
    world.begin_gather(1)
    assert not world.next_of_sender() and world.gathered == 0
    world.settle()
    assert world.protocol.serving == {"engine-0": 1} and world.live == [0, 1]


def test_an_engine_that_hangs_in_a_broadcast_is_evicted_and_the_others_go_on() -> None:
    world = quiet_world(3)
    world.offer(0)
    world.settle()
    world.members["engine-1"].fate = "hung"
    world.offer(1)
    world.settle()
    assert world.evicted == {"engine-1"}
    assert world.protocol.serving == {"engine-0": 1, "engine-2": 1}
    assert world.protocol.epoch == 2


def test_a_restarted_engine_is_stale_until_it_committed() -> None:
    world = quiet_world(1)
    world.offer(0)
    world.settle()
    world.carry_out(world.protocol.lost("engine-0", "killed", now=0.0))
    world.add("engine-0b")
    assert world.protocol.serving == {}
    world.settle()  # the sender still holds version 0: the newcomer gets it without waiting for the next
    assert world.protocol.serving == {"engine-0b": 0}


def test_a_newcomer_that_nobody_reaches_does_not_end_the_run() -> None:
    """It answers the driver, and no group forms with it."""
    world = quiet_world(2)
    world.offer(0)
    world.settle()
    world.add("unreachable")
    world.members["unreachable"].fate = "cut off"
    world.settle()
    assert world.gave_up is None and world.evicted == {"unreachable"}
    world.offer(1)
    world.settle()
    assert world.protocol.serving == {"engine-0": 1, "engine-1": 1}


def test_a_first_group_that_does_not_form_is_given_up() -> None:
    world = quiet_world(2)
    world.members["engine-1"].fate = "cut off"
    world.offer(0)
    world.settle()
    assert world.gave_up == "version 0 could not be sent in 3 attempts" and not world.evicted


def test_an_engine_that_serves_a_version_is_not_told_to_commit_it_again() -> None:
    world = quiet_world(1)
    world.offer(0)
    world.settle()
    world.add("engine-1")
    world.settle()
    assert world.protocol.serving == {"engine-0": 0, "engine-1": 0}
    assert not world.evicted


def test_reports_of_an_older_epoch_count_for_nothing() -> None:
    protocol = SyncProtocol(deadlines=DEADLINES)
    protocol.add("a", now=0.0)
    protocol.offer(0, now=0.0)
    for member in (SENDER, "a"):
        protocol.joined(member, epoch=1, now=0.0)
    protocol.failed("a", epoch=1, now=0.0)
    for member in (SENDER, "a"):
        protocol.was_reset(member, epoch=1, now=0.0)
    assert (protocol.phase, protocol.epoch) == (Phase.FORMING, 2)
    assert protocol.joined("a", epoch=1, now=0.0) == []
    assert protocol.staged("a", epoch=1, now=0.0) == []
    assert {wait.member for wait in protocol.waiting()} == {SENDER, "a"}


def test_a_lost_sender_ends_it() -> None:
    world = quiet_world(1)
    world.offer(0)
    world.carry_out(world.protocol.lost(SENDER, "killed", now=0.0))
    assert world.gave_up is not None


def test_who_waits_for_whom_is_told() -> None:
    world = quiet_world(2)
    world.members["engine-1"].fate = "hung"
    world.now = 7.0
    world.offer(0)
    while world.work:
        world.perform(world.work.pop(0))
    while world.inbox:
        world.deliver(world.inbox.pop(0))
    waits = world.protocol.waiting()
    assert [(w.member, w.what, w.since) for w in waits if w.member == "engine-1"] == [
        ("engine-1", "to join epoch 1", 7.0)
    ]


def test_engines_that_hang_one_after_the_other_do_not_take_a_good_one_with_them() -> None:
    world = quiet_world(5)
    world.offer(0)
    world.settle()
    world.offer(1)
    for i in range(4):
        world.members[f"engine-{i}"].fate = "hung"
        while world.work or world.inbox:
            if world.work:
                world.perform(world.work.pop(0))
            else:
                world.deliver(world.inbox.pop(0))
        for _ in range(2):  # the deadline of the attempt, then that of the reset
            assert world.protocol.deadline is not None
            world.now = world.protocol.deadline
            world.carry_out(world.protocol.tick(now=world.now))
            while world.work or world.inbox:
                if world.protocol.phase is Phase.FORMING and i < 3:
                    break
                if world.work:
                    world.perform(world.work.pop(0))
                else:
                    world.deliver(world.inbox.pop(0))
    world.settle()
    assert world.evicted == {f"engine-{i}" for i in range(4)}
    assert world.protocol.serving == {"engine-4": 1}


def test_a_group_that_broke_is_not_used_again_for_a_newcomer_of_the_same_name() -> None:
    protocol = SyncProtocol(deadlines=DEADLINES)
    protocol.add("a", now=0.0)
    protocol.offer(0, now=0.0)
    for member in (SENDER, "a"):
        protocol.joined(member, epoch=1, now=0.0)
    protocol.lost("a", "killed", now=0.0)
    protocol.was_reset(SENDER, epoch=1, now=0.0)
    assert protocol.phase is Phase.IDLE
    assert protocol.add("a", now=0.0) == [Join(2, (SENDER, "a"))]


def test_late_reports_of_failure_and_commit_count_for_nothing() -> None:
    protocol = SyncProtocol(deadlines=DEADLINES)
    protocol.add("a", now=0.0)
    protocol.offer(0, now=0.0)
    for member in (SENDER, "a"):
        protocol.joined(member, epoch=1, now=0.0)
    assert protocol.failed("a", epoch=0, now=0.0) == []
    protocol.sent(epoch=1, now=0.0)
    protocol.staged("a", epoch=1, now=0.0)
    assert protocol.committed("a", version=-5, now=0.0) == []
    assert protocol.serving == {}
    assert protocol.committed("a", version=0, now=0.0) == [Live(0)]
