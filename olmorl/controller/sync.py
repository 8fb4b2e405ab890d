"""One weight update, from the learners to every engine.

The learners gather a snapshot of their shards; rank 0 broadcasts it bucket by bucket while it already trains on, and
engines stage it while they decode. Only when every engine holds every bucket does the driver say commit: each engine
then compares checksums and swaps between two of its steps, KV cache kept. Every wait has a deadline.
"""

import asyncio
import time
from dataclasses import dataclass

import numpy as np

from olmorl.config.schema import SyncSection
from olmorl.contract.errors import SyncError, WorkerError
from olmorl.contract.generation import WorkerInfo
from olmorl.contract.training import ScoreRequest
from olmorl.contract.weights import CommitReport, Manifest, SendReport, SyncGroup, combine_checksums, plan_buckets
from olmorl.controller.cluster import Remote
from olmorl.controller.rollout import RolloutService


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    version: int
    seconds: float  # from the snapshot to the last commit
    stall_seconds: float  # the longest any engine stood still for this update
    num_bytes: int
    canary_mean: float | None  # |logprob of engine - logprob of learner| over the canary's tokens
    canary_max: float | None


class WeightSync:
    def __init__(
        self,
        *,
        engines: list[Remote],
        learners: list[Remote],
        service: RolloutService,
        section: SyncSection,
        transport: str,
        canary: ScoreRequest | None,
    ) -> None:
        self._engines = engines
        self._learners = learners
        self._service = service
        self._section = section
        self._transport = transport
        self._canary = canary
        self._manifest: Manifest | None = None
        self._canary_logprobs: np.ndarray | None = None

    async def connect(self, info: WorkerInfo) -> None:
        """Plan the buckets on both sides and join the broadcast group: learner rank 0 sends, engines receive."""
        deadline = self._section.timeout_seconds
        bucket_bytes = self._section.bucket_mb << 20
        self._manifest = plan_buckets(info.tensors, bucket_bytes=bucket_bytes)
        await _all(self._engines, "plan_updates", bucket_bytes, timeout=deadline)
        await _all(self._learners, "plan_updates", info.tensors, bucket_bytes, timeout=deadline)
        host, port = await self._learners[0].call("host_store", timeout=deadline)
        members = [self._learners[0], *self._engines]
        await asyncio.gather(
            *(
                member.call(
                    "join_sync_group",
                    SyncGroup(
                        epoch=0,
                        host=host,
                        port=port,
                        rank=rank,
                        size=len(members),
                        transport=self._transport,
                        timeout_seconds=deadline,
                    ),
                    timeout=2 * deadline,
                )
                for rank, member in enumerate(members)
            )
        )

    async def snapshot(self, version: int) -> None:
        """Collective over the learners; afterwards they may train on. The canary is scored on the same weights."""
        deadline = self._section.timeout_seconds
        await _all(self._learners, "gather_update", version, timeout=deadline)
        if self._canary is not None:
            scores = await _all(self._learners, "score", self._canary, timeout=deadline)
            self._canary_logprobs = np.concatenate(scores[0])

    async def publish(self, version: int) -> UpdateReport:
        """Bring the last snapshot to every engine as `version`."""
        started = time.perf_counter()
        mode = self._section.mode
        stalls = 0.0
        if mode == "drain":
            self._service.hold()
            await self._service.idle()
        stopped = time.perf_counter()
        if mode != "inflight":
            await _all(self._engines, "pause", timeout=self._section.timeout_seconds)
        try:
            sent, commits = await self._broadcast_and_commit(version)
        finally:
            if mode != "inflight":
                await _all(self._engines, "resume", timeout=self._section.timeout_seconds)
                stalls = time.perf_counter() - (started if mode == "drain" else stopped)
            self._service.release()
        seconds = time.perf_counter() - started
        mean, largest = await self._compare_canary()
        return UpdateReport(
            version=version,
            seconds=seconds,
            stall_seconds=max([stalls, *(c.stall_seconds for c in commits)]),
            num_bytes=sent.num_bytes,
            canary_mean=mean,
            canary_max=largest,
        )

    async def _broadcast_and_commit(self, version: int) -> tuple[SendReport, list[CommitReport]]:
        assert self._manifest is not None, "connect() first"
        deadline = self._section.timeout_seconds
        try:
            sent, *_ = await asyncio.gather(
                self._learners[0].call("broadcast", version, timeout=2 * deadline),
                *(e.call("receive_weights", version, timeout=2 * deadline) for e in self._engines),
            )
            commits = await _all(
                self._engines, "commit_weights", version, sent.checksums, self._section.kv, timeout=deadline
            )
        except WorkerError as error:
            raise SyncError(f"update to version {version} failed: {error}") from None
        expected = combine_checksums(sent.checksums, self._manifest.tensors)
        for commit in commits:
            if commit.checksum != expected:
                raise SyncError(
                    f"{commit.worker} serves version {version} with checksum {commit.checksum}, "
                    f"the learner sent {expected}"
                )
        return sent, commits

    async def _compare_canary(self) -> tuple[float | None, float | None]:
        if self._canary is None or self._canary_logprobs is None:
            return None, None
        scores = await _all(self._engines, "score", self._canary, timeout=self._section.timeout_seconds)
        differences = [np.abs(np.concatenate(score) - self._canary_logprobs) for score in scores]
        return float(np.mean(differences)), float(np.max(differences))


async def _all(workers: list[Remote], method: str, *args: object, timeout: float) -> list:
    return await asyncio.gather(*(worker.call(method, *args, timeout=timeout) for worker in workers))
