"""A rollout of real prompts on real engines in this process; only the transport without Ray stands in."""

import asyncio
import json
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from olmorl.config.data_sections import RewardSection, SourceSection
from olmorl.contract.errors import WorkerError
from olmorl.contract.generation import EngineConfig, SamplingParams
from olmorl.controller.background import Background
from olmorl.controller.rollout import RolloutService
from olmorl.controller.scoring import Scorer, full_reward, verifiers_to_load
from olmorl.data.tokenizer import PromptEncoder, load_tokenizer
from olmorl.metrics.rollout_log import RolloutRow
from olmorl.rollouts.job import RolloutJob
from olmorl.rollouts.output import RolloutFiles
from olmorl.rollouts.prompt_reader import PromptReader, full_rewards, named_verifiers
from olmorl.rollouts.roller import Roller
from olmorl.rollouts.tally import Tally

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart"
MODEL = str(QUICKSTART / "model")


class InProcess:
    """`Remote` without a cluster: the same `call`, answered by a worker of this process."""

    def __init__(self, worker: Any, name: str) -> None:
        self.worker = worker
        self.name = name
        self._asked: deque[str] = deque(maxlen=100)

    async def call(self, method: str, *args: Any, timeout: float) -> Any:
        if method == "submit":
            self._asked.extend(request.request_id for request in args[0])
        async with asyncio.timeout(timeout):
            return await asyncio.to_thread(getattr(self.worker, method), *args)

    def forget_requests(self) -> None:
        """So that the next command finds it as new: one that was broken off leaves its requests behind."""
        with suppress(WorkerError):  # it was shut down
            self.worker.abort(list(self._asked))
            self.worker.drain(0.0)
        self._asked.clear()


def start_engine(name: str, *, kv_cache_tokens: int = 2048) -> InProcess:
    from inference.worker import InferenceWorker  # torch, which most of these tests do without

    config = EngineConfig(
        model=MODEL,
        max_num_seqs=8,
        kv_cache_tokens=kv_cache_tokens,
        max_model_len=100,
        threads=1,
        deterministic=True,
    )
    return InProcess(InferenceWorker(config, name=name, initial_version=0), name)


class Stop(Exception):
    """The test's own kill."""


class StoppingFiles(RolloutFiles):
    """Raises Stop once so many rows are written."""

    rows_left = 10**9

    def write(self, rows: Any) -> None:
        super().write(rows)
        self.rows_left -= len(rows)
        if self.rows_left <= 0:
            raise Stop


def make_job(out: Path, **changes: Any) -> RolloutJob:
    options: dict[str, Any] = {
        "engine": EngineConfig(model=MODEL),
        "prompts": SourceSection(path=str(QUICKSTART / "held_out.jsonl"), limit=12),
        "params": SamplingParams(n=3, max_tokens=40),
        "seed": 3,
        "verifier": ("gsm8k",),
        "rows_per_file": 10,
    }
    return RolloutJob(out=out, **(options | changes))


def roll_out(
    job: RolloutJob, *, engines: list[InProcess], rows: int | None = None, on_engine: Callable[..., None] | None = None
) -> Tally:
    """The command without its cluster; broken off after `rows` rows."""
    files = StoppingFiles(job.out, rows_per_file=job.rows_per_file)
    tally = Tally(job.params.n)
    full = partial(full_reward, RewardSection())
    if files.exists:
        rows_there = list(files.resume(job.identity))
        tally.recount(rows_there, full_rewards(job.prompts, verifiers=job.given_verifiers, full_reward=full))
        assert tally.num_samples == len(rows_there), "a row is there twice"
    else:
        files.begin(job.identity)
    files.rows_left = 10**9 if rows is None else rows
    reader = PromptReader(
        job.prompts,
        encoder=PromptEncoder(load_tokenizer(MODEL)),
        max_prompt_tokens=99,
        verifiers=job.given_verifiers,
        scored=job.verifier is not None,
        full_reward=full,
    )

    async def main() -> None:
        losses: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        service = RolloutService(on_lost=lambda *loss: losses.put_nowait(loss))

        async def watch_engines() -> None:
            alive = {engine.name for engine in engines}
            while alive:
                name, reason = await losses.get()
                alive.discard(name)
                service.remove_worker(name)
            raise WorkerError(f"no engine is left: {reason}")

        for engine in engines:
            service.ensure_worker(engine)  # type: ignore[arg-type]
        scorer = None
        if job.verifier is not None:
            given = job.given_verifiers
            names = verifiers_to_load(RewardSection(), named_verifiers(job.prompts) if given is None else given)
            scorer = await Scorer.start(RewardSection(), verifiers=names)
        roller = Roller(
            service=service,
            scorer=scorer,
            files=files,
            tally=tally,
            params=job.params,
            seed=job.seed,
            capacity=10,
            attempt=1,
        )
        if on_engine is not None:
            on_engine(roller)
        background = Background()
        background.start_loop("service", service.run())
        background.start_loop("engines", watch_engines())
        try:
            await background.unless_failed(roller.run(iter(reader)))
        finally:
            await background.close()
            await service.close()
            if scorer is not None:
                await scorer.close()

    complete = False
    try:
        asyncio.run(main())
        complete = True
    except BaseExceptionGroup as group:
        if rows is None or not group.subgroup(Stop):
            raise
    finally:
        files.close(complete=complete)
        for engine in engines:
            engine.forget_requests()
    return tally


def read_rows(out: Path) -> list[dict[str, Any]]:
    """All files of an output, by prompt and sample."""
    rows: list[dict[str, Any]] = []
    for path in sorted(out.parent.glob(f"{out.stem}*{out.suffix}")):
        if path.suffix == ".parquet":
            rows += pq.read_table(path).to_pylist()
        else:
            rows += [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(rows, key=lambda row: (int(row["prompt_id"].rpartition("_")[2]), row["sample"]))


def assert_same_samples(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        for name in (
            "rollout_id",
            "prompt_token_ids",
            "token_ids",
            "text",
            "finish_reason",
            "reward",
            "seed",
            "verdict",
        ):
            assert row[name] == other[name], (name, row["rollout_id"])
        for name in ("logprobs", "raw_logprobs"):
            assert np.allclose(row[name], other[name], atol=1e-4), row["rollout_id"]


def make_row(index: int, sample: int, *, length: int = 3, reward: float | None = None) -> RolloutRow:
    ids = np.arange(length, dtype=np.int32)
    return RolloutRow(
        rollout_id=f"0_{index}_{sample}",
        prompt_id=f"0_{index}",
        sample=sample,
        step=0,
        attempt=1,
        data_source="made",
        prompt_token_ids=np.array([index, index + 1], np.int32),
        token_ids=ids,
        loss_mask=np.ones(length, bool),
        logprobs=-ids.astype(np.float32),
        raw_logprobs=-ids.astype(np.float32),
        version_spans=((0, 0, length),),
        kv_events=((0, 0, "prefill"),),
        text="\ud800 ü\n" if sample else "plain",
        finish_reason="length",
        reward=reward,
        verdict=None if reward is None else "scored",
        advantage=None,
        fate=None,
        seed=7,
        worker="w",
        t_admitted=1.0,
        t_first_token=2.0,
        t_finished=3.0,
        t_trained=None,
    )


class Kit:
    """What the tests share."""

    make_job = staticmethod(make_job)
    make_row = staticmethod(make_row)
    roll_out = staticmethod(roll_out)
    read_rows = staticmethod(read_rows)
    assert_same_samples = staticmethod(assert_same_samples)
    start_engine = staticmethod(start_engine)
    in_process = InProcess
    model = MODEL


@pytest.fixture(scope="session")
def kit() -> type[Kit]:
    return Kit


@pytest.fixture(autouse=True)
def _short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll that nobody waits for any more holds its thread, and so the end of the test."""
    monkeypatch.setattr("olmorl.controller.rollout.POLL_SECONDS", 0.3)
