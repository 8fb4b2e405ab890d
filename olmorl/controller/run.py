"""A training run: everything is composed here, and nothing is decided.

The loops live on an event loop in a thread of their own, so that generation goes on while the caller's code runs
between two calls. `train()` is the whole run; `next_batch`, `train_step`, `publish` and `checkpoint` are its pieces.
"""

import asyncio
import logging
import threading
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from olmorl.config.dump import dump_toml
from olmorl.config.schema import Config
from olmorl.contract.errors import ConfigError, SyncError, WorkerLostError
from olmorl.controller.announce import announce, announce_peaks
from olmorl.controller.cluster import Cluster, cluster_address
from olmorl.controller.compose import compose, load_inputs, read_beginning
from olmorl.controller.driver_log import DriverLog
from olmorl.controller.loop import Batch
from olmorl.controller.placement import Placement, plan_placement, this_machine
from olmorl.controller.run_directory import RunDirectory, write_atomically, write_json
from olmorl.controller.scoring import Scorer
from olmorl.controller.session import Session
from olmorl.controller.stage import Stage, stage

T = TypeVar("T")
log = logging.getLogger(__name__)


class Run:
    """A run of `config`. Nothing starts before `start()` (which `train()` calls); `close()` stops everything.

    Example:
        with Run(config) as run:
            run.start()
            for _ in range(config.run.steps):
                run.train_step(run.next_batch())
                run.publish()
                run.checkpoint()
    """

    def __init__(self, config: Config, *, resume: bool = False) -> None:
        """Raises ConfigError for cluster.split = "auto", which `olmorl.planner.split.split` turns into settings."""
        if config.cluster.split == "auto":
            raise ConfigError(
                "cluster.split = 'auto' is for `olmorl train`; here, turn it into counts: "
                "Run(olmorl.planner.split.split(config, nodes))"
            )
        self.config = config
        self._resume = resume
        self._lost_workers = False
        self._directory = RunDirectory(config.run.directory)
        self._open_loop()
        self._claimed: IO[bytes] | None = None
        self._log: DriverLog | None = None
        self._cluster: Cluster | None = None
        self._scorer: Scorer | None = None
        self._session: Session | None = None

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def train(self) -> dict[str, Any]:
        """The whole run, from where it stands to run.steps. Returns what summary.json holds.

        A run that is already finished is left as it is: nothing starts. When a learner is lost, everything is started
        again from the newest complete checkpoint, cluster.max_run_restarts times.
        """
        if self._resume and (summary := self._directory.finished(self.config.run.steps)) is not None:
            log.warning("%s is finished already", self._directory.path)
            return summary
        for restarts_left in range(self.config.cluster.max_run_restarts, 0, -1):
            try:
                return self._attempt()
            except (WorkerLostError, SyncError) as error:
                log.warning("%s; starting again from the newest checkpoint, %d restarts left", error, restarts_left - 1)
            self.close()
            self._open_loop()
            self._resume = self._lost_workers = True
        return self._attempt()

    def _attempt(self) -> dict[str, Any]:
        reason = "interrupted"
        try:
            self.start()
            while self.version < self.config.run.steps:
                self.train_step(self.next_batch())
                self.publish()
                self.checkpoint()
            self._do(self._running.finish())
            reason = "finished"
        except Exception as error:
            reason = f"failed: {error}"
            raise
        finally:
            summary = self._write_summary(reason)
        return summary

    def start(self) -> None:
        """Load the data, start the workers, send the first weights, evaluate, and begin to roll out."""
        assert self._session is None, "start() was called before"
        config, directory = self.config, self._directory
        inputs = load_inputs(config)
        if directory.path.exists():
            self._claimed = directory.claim()
        newest = directory.newest_complete() if self._resume else None
        beginning = read_beginning(config, inputs, newest)  # which may refuse: nothing of the directory is touched yet
        address = cluster_address(config.cluster.address)
        where = f"on the cluster at {address}"
        if address is None:
            here = plan_placement(config)
            here.check([this_machine(cpus=here.cpus)])  # CPUs are ours to declare
            where = here.describe()
        self._thread.start()
        self._scorer = self._do(
            Scorer.start(
                config.reward,
                verifiers=inputs.verifiers,
                environments=inputs.environments,
                tokenizer=inputs.tokenizer,
            )
        )
        self._do(self._scorer.check_truths(inputs.examples))
        attempt, checkpoint = directory.prepare(resume=self._resume)
        self._claimed = self._claimed or directory.claim()
        self._log = DriverLog(directory.logs(attempt))
        write_atomically(directory.config_file, dump_toml(config))
        if config.logging.console:
            resumed = checkpoint.name if checkpoint else ""
            announce(config, inputs, directory=directory, where=where, attempt=attempt, resumed_from=resumed)
        if beginning.changes:
            since = "" if checkpoint is None else checkpoint.name
            log.warning("settings that changed since %s: %s", since, "; ".join(beginning.changes))
        tell = partial(stage, told=address is not None)
        cluster, placement = self._open_cluster(address, directory.logs(attempt), tell=tell)
        with tell("workers load the model", seconds=config.cluster.start_timeout_seconds):
            self._session = self._do(
                compose(
                    config,
                    inputs=inputs,
                    directory=directory,
                    attempt=attempt,
                    beginning=beginning,
                    cluster=cluster,
                    placement=placement,
                    scorer=self._scorer,
                )
            )
        if config.logging.console:
            announce_peaks(self._session.peaks)
        with tell("the engines take the learners' weights", seconds=config.sync.timeout_seconds):
            self._do(self._session.start())

    def _open_cluster(self, address: str | None, log_dir: Path, *, tell: Stage) -> tuple[Cluster, Placement]:
        """Start it or join it, and hold what the workers need there."""
        config, seconds = self.config, self.config.cluster.start_timeout_seconds
        cluster = self._cluster = Cluster(address=address, cpus=plan_placement(config).cpus, log_dir=log_dir)
        cluster.__enter__()
        if not self._lost_workers:
            with tell(f"{config.cluster.nodes} nodes join", seconds=seconds):
                cluster.wait_for_nodes(config.cluster.nodes, timeout=seconds)
        placement = plan_placement(config, None if address is None else cluster.nodes())
        if self._lost_workers:  # what is left may hold no more; others join as there is room
            if not placement.shares_gpu:
                placement = replace(placement, inference_workers=config.cluster.min_inference_workers)
            cluster.wait_for_room(placement, timeout=seconds)
        with tell(f"room for {placement.describe()}", seconds=seconds):
            cluster.reserve(placement, timeout=seconds)
        return cluster, placement

    @property
    def version(self) -> int:
        """Policy version of the newest weights = optimizer steps done."""
        return self._running.version

    def next_batch(self) -> Batch:
        """Wait for a full batch of groups within the staleness window."""
        return self._do(self._running.next_batch())

    def train_step(self, batch: Batch) -> dict[str, float]:
        """One optimizer step; returns the learner's metrics."""
        return self._do(self._running.train_step(batch))

    def publish(self) -> None:
        """Send the newest weights to the engines, in the background."""
        self._do(self._running.publish())

    def checkpoint(self) -> None:
        """Save, if checkpoint.every says so for the step just trained."""
        self._do(self._running.checkpoint())

    def close(self) -> None:
        """Stop loops, workers and verifiers; safe to call at any time, and twice."""
        try:
            if self._thread.is_alive():
                self._do(self._stop())
        finally:
            cluster, self._cluster = self._cluster, None
            if cluster is not None:
                cluster.__exit__()
            if self._claimed is not None:
                self._claimed.close()
            if self._log is not None:
                self._log.close()
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
            self._loop.close()

    async def _stop(self) -> None:
        """Also what an interrupt left behind half done, such as a session that was still being composed."""
        session, self._session = self._session, None
        scorer, self._scorer = self._scorer, None
        if session is not None:
            await session.close()
        if scorer is not None:
            await scorer.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _open_loop(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="driver loops", daemon=True)

    @property
    def _running(self) -> Session:
        assert self._session is not None, "call start() first"
        return self._session

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loops' thread; an interrupt here cancels it there."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _write_summary(self, reason: str) -> dict[str, Any]:
        if self._session is None:
            return {"exit_reason": reason}
        summary = self._session.summary(reason)
        write_json(self._directory.summary_file, summary)
        return summary
