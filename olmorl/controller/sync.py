"""Weight updates, from the learners to every engine that serves.

The learners gather a snapshot of their shards; rank 0 broadcasts it bucket by bucket while it already trains on, and
engines stage it while they decode. Only when every engine holds every bucket does the driver say commit: each engine
then compares checksums and swaps between two of its steps, KV cache kept. What happens when somebody dies, hangs or
comes late is decided by `sync_protocol.py`; here its commands are carried out, each with a deadline.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import numpy as np

from olmorl.config.schema import SyncSection
from olmorl.contract.errors import OlmoRLError, SyncError, WeightUpdateError, WorkerError, WorkerLostError
from olmorl.contract.generation import WorkerInfo
from olmorl.contract.training import ScoreRequest
from olmorl.contract.weights import CommitReport, Manifest, SendReport, SyncGroup, combine_checksums, plan_buckets
from olmorl.controller.cluster import Remote
from olmorl.controller.rollout import RolloutService
from olmorl.controller.signal import Changed
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

log = logging.getLogger(__name__)

GRACE_SECONDS = 5.0  # a transport ends by its own deadline first, the protocol's comes a little later
RESET_SECONDS = 10.0
STALL_REPORT_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    version: int
    seconds: float  # from the snapshot to the last commit
    stall_seconds: float  # the longest any engine stood still for this update
    num_bytes: int
    checksum_ok: float  # share of the engines asked to commit whose weights are the learner's; the others are evicted
    canary_mean: float | None  # |logprob of engine - logprob of learner| over the canary's tokens
    canary_max: float | None


class WeightSync:
    def __init__(
        self,
        *,
        learners: list[Remote],
        service: RolloutService,
        section: SyncSection,
        transport: str,
        canary: ScoreRequest | None,
        on_lost: Callable[[str, str], None],
    ) -> None:
        """`on_lost(engine, reason)` is told when an engine fails or is evicted; it must then call `lost`."""
        limit = section.timeout_seconds
        deadlines = Deadlines(
            form=limit + GRACE_SECONDS,
            send=limit + GRACE_SECONDS,
            commit=limit + GRACE_SECONDS,
            reset=RESET_SECONDS,
        )
        self._protocol = SyncProtocol(deadlines=deadlines)
        self._learners = learners
        self._service = service
        self._section = section
        self._transport = transport
        self._canary = canary
        self._on_lost = on_lost
        self._engines: dict[str, Remote] = {}
        self._manifest: Manifest | None = None
        self._store = ("", 0)
        self._canary_logprobs: np.ndarray | None = None
        self._sent: SendReport | None = None
        self._commits: dict[str, CommitReport] = {}
        self._refusals = 0  # of this update: engines whose weights would not be the learner's
        self._last_failure = ""
        self._gave_up: Exception | None = None
        self._changed = Changed()
        self._tasks: set[asyncio.Task[None]] = set()
        self.mode = section.mode
        """may be changed between two updates"""
        self.failures = 0
        """attempts that broke, since the run began"""

    @property
    def serving(self) -> list[Remote]:
        """The engines that serve the newest live version."""
        live = self._protocol.live_version
        return [self._engines[name] for name, version in self._protocol.serving.items() if version == live]

    # Membership

    async def connect(self, info: WorkerInfo) -> None:
        """Plan the buckets of the model on the learners, and open the store where groups meet."""
        deadline = self._section.timeout_seconds
        self._manifest = plan_buckets(info.tensors, bucket_bytes=self._bucket_bytes)
        shared = self._transport == "ipc"
        await _all(self._learners, "plan_updates", info.tensors, self._bucket_bytes, shared, timeout=deadline)
        self._store = await self._learners[0].call("host_store", timeout=deadline)

    async def add(self, engine: Remote) -> None:
        """A newcomer, stale until it has committed the newest weights; then the service gets it."""
        staging = self._section.staging
        await engine.call("plan_updates", self._bucket_bytes, staging, timeout=self._section.timeout_seconds)
        self._engines[engine.name] = engine
        self._carry_out(self._protocol.add(engine.name, now=_now()))

    def lost(self, engine: str, reason: str) -> None:
        """The engine's process is gone, or is being killed. Nothing for an unknown one."""
        if self._engines.pop(engine, None) is not None:
            self._carry_out(self._protocol.lost(engine, reason, now=_now()))

    # Updates

    async def snapshot(self, version: int) -> None:
        """Collective over the learners; afterwards they may train on. The canary is scored on the same weights.

        Waits until no engine is sent anything, which happens when one was replaced: a transfer and a gather never meet.
        """
        deadline = self._section.timeout_seconds
        self._protocol.withdraw()
        await self._until(lambda: self._protocol.phase is Phase.IDLE, f"the snapshot of version {version}")
        await _all(self._learners, "gather_update", version, timeout=deadline)
        if self._canary is not None:
            scores = await _all(self._learners, "score", self._canary, timeout=deadline)
            self._canary_logprobs = np.concatenate(scores[0])

    async def publish(self, version: int) -> UpdateReport:
        """Bring the last snapshot to every engine as `version`. Raises SyncError when that cannot be done."""
        started = time.perf_counter()
        mode = self.mode
        stall = 0.0
        if mode == "drain":
            self._service.hold()
            await self._service.idle()
        stopped = time.perf_counter()
        paused = await self._pause() if mode != "inflight" else []
        self._commits, self._refusals = {}, 0
        try:
            self._carry_out(self._protocol.offer(version, now=_now()))
            await self._live(version)
        finally:
            if mode != "inflight":
                await self._resume(paused)
                stall = time.perf_counter() - (started if mode == "drain" else stopped)
            self._service.release()
        seconds = time.perf_counter() - started
        mean, largest = await self._compare_canary()
        return UpdateReport(
            version=version,
            seconds=seconds,
            stall_seconds=max([stall, *(c.stall_seconds for c in self._commits.values())]),
            num_bytes=self._manifest.num_bytes if self._manifest else 0,
            checksum_ok=len(self._commits) / max(1, len(self._commits) + self._refusals),
            canary_mean=mean,
            canary_max=largest,
        )

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _live(self, version: int) -> None:
        await self._until(lambda: self._protocol.live_version == version, f"version {version}")

    async def _until(self, reached: Callable[[], bool], who: str) -> None:
        """Wait, and say every few seconds for whom. Raises what made the protocol give up."""
        while not await self._settled_within(reached, STALL_REPORT_SECONDS):
            for wait in self._protocol.waiting():
                seconds = _now() - wait.since
                log.warning("%s waits for %s %s, since %.0f s", who, wait.member, wait.what, seconds)
        if self._gave_up is not None:
            raise self._gave_up

    async def _settled_within(self, reached: Callable[[], bool], seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._changed.until(lambda: self._gave_up is not None or reached())
        except TimeoutError:
            return False
        return True

    async def _pause(self) -> list[Remote]:
        engines = self.serving
        await self._each(engines, "pause")
        return engines

    async def _resume(self, engines: list[Remote]) -> None:
        await self._each([e for e in engines if e.name in self._engines], "resume")

    async def _each(self, engines: list[Remote], method: str) -> None:
        """Call every engine; one that fails is lost, and the others go on."""
        calls = (engine.call(method, timeout=self._section.timeout_seconds) for engine in engines)
        for engine, result in zip(engines, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(result, WorkerError):
                self._on_lost(engine.name, str(result))
            elif isinstance(result, BaseException):
                raise result

    async def _compare_canary(self) -> tuple[float | None, float | None]:
        if self._canary is None or self._canary_logprobs is None:
            return None, None
        differences = []
        for engine in self.serving:
            try:
                scores = await engine.call("score", self._canary, timeout=self._section.timeout_seconds)
            except WorkerError as error:
                self._on_lost(engine.name, str(error))
                continue
            differences.append(np.abs(np.concatenate(scores) - self._canary_logprobs))
        if not differences:
            return None, None
        return float(np.mean(differences)), float(np.max(differences))

    # Carrying out what the protocol says

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Join(epoch, members):
                    for rank, member in enumerate(members):
                        self._start(member, self._join(member, self._sync_group(epoch, rank, len(members))), epoch)
                case Transfer(epoch, version, engines):
                    self._start(SENDER, self._send(epoch, version), epoch)
                    for engine in engines:
                        self._start(engine, self._receive(engine, epoch, version), epoch)
                case Commit(engine, version):
                    self._start(engine, self._commit(engine, version), self._protocol.epoch)
                case Discard(engine, version):
                    self._start(engine, self._call(engine, "discard_weights", version), self._protocol.epoch)
                case Reset(member, epoch):
                    self._start(member, self._reset(member, epoch), epoch)
                case Evict(engine, reason):
                    self._engines.pop(engine, None)
                    self._on_lost(engine, reason)
                case Live(version):
                    for remote in self.serving:
                        self._service.ensure_worker(remote)
                case GiveUp(reason):
                    self._gave_up = SyncError(f"the weights cannot be sent: {reason}{self._last_failure}")
        self._watch_deadline()
        self._changed.notify()

    def _start(self, member: str, work: Coroutine[Any, Any, None], epoch: int) -> None:
        task = asyncio.create_task(self._reported(member, work, epoch), name=f"sync {member}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reported(self, member: str, work: Coroutine[Any, Any, None], epoch: int) -> None:
        """A member that says it failed lives; one that does not answer, or whose engine broke, is lost."""
        try:
            await work
        except SyncError as error:
            log.warning("%s: %s", member, error)
            self.failures += 1
            self._last_failure = f"; the last said by {member}: {error}"
            self._carry_out(self._protocol.failed(member, epoch=epoch, now=_now()))
        except WorkerError as error:
            if member == SENDER:
                self._gave_up = WorkerLostError(f"the learner that sends is lost: {error}")
                self._changed.notify()
            else:
                self._on_lost(member, str(error))
        except OlmoRLError as error:
            self._gave_up = SyncError(f"{member}: {error}")
            self._changed.notify()
        except Exception as error:  # a bug here: whoever waits for the update raises it
            self._gave_up = error
            self._changed.notify()

    async def _call(self, member: str, method: str, *args: object, grace: float = GRACE_SECONDS) -> Any:
        remote = self._learners[0] if member == SENDER else self._engines.get(member)
        if remote is None:
            return None  # evicted since
        return await remote.call(method, *args, timeout=self._section.timeout_seconds + 2 * grace)

    async def _join(self, member: str, group: SyncGroup) -> None:
        await self._call(member, "join_sync_group", group)
        self._carry_out(self._protocol.joined(member, epoch=group.epoch, now=_now()))

    async def _send(self, epoch: int, version: int) -> None:
        self._sent = await self._call(SENDER, "broadcast", version)
        self._carry_out(self._protocol.sent(epoch=epoch, now=_now()))

    async def _receive(self, engine: str, epoch: int, version: int) -> None:
        await self._call(engine, "receive_weights", version)
        self._carry_out(self._protocol.staged(engine, epoch=epoch, now=_now()))

    async def _commit(self, engine: str, version: int) -> None:
        assert self._sent is not None and self._manifest is not None, "a commit before anything was sent"
        checksums = self._sent.checksums
        try:
            report: CommitReport | None = await self._call(
                engine, "commit_weights", version, checksums, self._section.kv
            )
        except WeightUpdateError as error:
            self._refuse(engine, str(error), version)
            return
        if report is None:
            return
        expected = combine_checksums(checksums, self._manifest.tensors)
        if report.checksum != expected:
            reason = f"serves version {version} with checksum {report.checksum}, the learner sent {expected}"
            self._refuse(engine, reason, version)
            return
        self._commits[engine] = report
        self._carry_out(self._protocol.committed(engine, version=version, now=_now()))

    def _refuse(self, engine: str, reason: str, version: int) -> None:
        self._refusals += 1
        self._carry_out(self._protocol.refused(engine, reason, version=version, now=_now()))

    async def _reset(self, member: str, epoch: int) -> None:
        try:
            await self._call(member, "reset_sync", epoch)
        except WorkerError as error:
            log.warning("%s did not take a reset: %s", member, error)  # the protocol's deadline decides
            return
        self._carry_out(self._protocol.was_reset(member, epoch=epoch, now=_now()))

    def _sync_group(self, epoch: int, rank: int, size: int) -> SyncGroup:
        host, port = self._store
        return SyncGroup(
            epoch=epoch,
            host=host,
            port=port,
            rank=rank,
            size=size,
            transport=self._transport,
            timeout_seconds=self._section.timeout_seconds,
        )

    def _watch_deadline(self) -> None:
        deadline = self._protocol.deadline
        if deadline is not None:
            asyncio.get_running_loop().call_later(max(0.0, deadline - _now()) + 0.01, self._tick)

    def _tick(self) -> None:
        commands = self._protocol.tick(now=_now())
        if commands:
            self._carry_out(commands)

    @property
    def _bucket_bytes(self) -> int:
        return self._section.bucket_mb << 20


def _now() -> float:
    return time.monotonic()


async def _all(workers: list[Remote], method: str, *args: object, timeout: float) -> list[Any]:
    """Call every worker, and say every few seconds who has not answered. The first failure is raised at once."""
    calls = {asyncio.create_task(worker.call(method, *args, timeout=timeout)): worker.name for worker in workers}
    started = _now()
    late = set(calls)
    try:
        while late:
            done, late = await asyncio.wait(late, timeout=STALL_REPORT_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
            for call in done:
                call.result()
            for call in late:
                log.warning("%s() waits for %s, since %.0f s", method, calls[call], _now() - started)
        return [call.result() for call in calls]
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
