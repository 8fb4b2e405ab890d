"""Rollouts on real engines in this process: broken and resumed, on one engine or two, they are the same samples."""

import json
import resource
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from olmorl.config.data_sections import SourceSection
from olmorl.contract.errors import ConfigError
from olmorl.contract.generation import DrainReply, RolloutRequest, RolloutSample, SamplingParams


@pytest.fixture(scope="module")
def engines(kit: Any) -> Iterator[list[Any]]:
    started = [kit.start_engine("inference-0"), kit.start_engine("inference-1")]
    yield started
    for engine in started:
        engine.worker.shutdown()


@pytest.fixture(scope="module")
def unbroken(kit: Any, engines: list[Any], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("unbroken") / "out.jsonl"
    tally = kit.roll_out(kit.make_job(out), engines=engines[:1])
    assert tally.num_samples == 36 and tally.verdicts == {"scored": 36}
    return kit.read_rows(out)


def test_every_sample_once_with_its_score(unbroken: list[dict[str, Any]]) -> None:
    assert [row["rollout_id"] for row in unbroken] == [f"0_{i}_{s}" for i in range(12) for s in range(3)]
    assert {row["reward"] for row in unbroken} == {0.0, 1.0} and {row["fate"] for row in unbroken} == {None}
    assert len({row["seed"] for row in unbroken}) == 12
    assert all(len(row["token_ids"]) == len(row["logprobs"]) == len(row["loss_mask"]) for row in unbroken)


def test_a_row_has_what_a_run_would_write(
    kit: Any, engines: list[Any], unbroken: list[dict[str, Any]], tmp_path: Path
) -> None:
    said = [json.loads(line) for line in Path(kit.make_job(tmp_path).prompts.path).read_text().splitlines()]
    for row in unbroken:
        index = int(row["prompt_id"].rpartition("_")[2])
        assert row["prompt"] == said[index]["prompt"]
        assert json.loads(row["ground_truth"]) == said[index]["answer"]
        assert row["verdict_detail"] is not None
    plain = kit.make_job(tmp_path / "plain.jsonl", verifier=None)
    kit.roll_out(plain, engines=engines)
    rows = kit.read_rows(plain.out)
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in unbroken]
    assert {(row["ground_truth"], row["verdict"], row["reward"]) for row in rows} == {(None, None, None)}


@pytest.mark.parametrize("own", [False, True])
def test_to_satisfy_one_of_two_verifiers_is_not_to_solve(
    kit: Any, engines: list[Any], unbroken: list[dict[str, Any]], tmp_path: Path, own: bool
) -> None:
    """Also what an earlier attempt wrote: half the rows are counted again when the output is resumed."""
    prompts = tmp_path / "p.jsonl"
    lines = Path(kit.make_job(tmp_path).prompts.path).read_text().splitlines()[:12]
    rows = [json.loads(line) | {"verifier": ["gsm8k", "format"] if own else "gsm8k"} for line in lines]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    verifier = ("auto",) if own else ("gsm8k", "format")
    job = kit.make_job(tmp_path / "out.jsonl", prompts=SourceSection(path=str(prompts)), verifier=verifier)
    kit.roll_out(job, engines=engines, rows=18)
    summary = kit.roll_out(replace(job, prompts=SourceSection(path=str(prompts), limit=3)), engines=engines).summary()
    assert summary["samples"] >= 18 and summary["reward_mean"] > 0
    assert summary["solved_never"] == 1.0, "nobody thinks aloud here"


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_broken_and_resumed_is_unbroken(
    kit: Any, engines: list[Any], unbroken: list[dict[str, Any]], tmp_path: Path, suffix: str
) -> None:
    job = kit.make_job(tmp_path / f"out{suffix}")
    for rows in (5, 1, 13, None):
        kit.roll_out(job, engines=engines, rows=rows)
    kit.assert_same_samples(kit.read_rows(job.out), unbroken)
    again = kit.roll_out(job, engines=engines)
    assert again.num_samples == 36 and len(kit.read_rows(job.out)) == 36


def test_only_what_is_missing_is_sampled_again(kit: Any, engines: list[Any], tmp_path: Path) -> None:
    job = kit.make_job(tmp_path / "out.jsonl", rows_per_file=1000)
    kit.roll_out(job, engines=engines)
    lines = job.out.read_text().splitlines(keepends=True)
    job.out.write_text("".join(lines[:7] + lines[8:]))
    before = sum(engine.worker._engine.clock.totals.finished for engine in engines)
    kit.roll_out(job, engines=engines)
    assert sum(engine.worker._engine.clock.totals.finished for engine in engines) == before + 1
    assert sorted(job.out.read_text().splitlines())[0] and len(job.out.read_text().splitlines()) == 36


def test_an_engine_may_be_lost(kit: Any, engines: list[Any], unbroken: list[dict[str, Any]], tmp_path: Path) -> None:
    doomed = kit.start_engine("doomed")
    doomed.worker.pause()

    def watch(roller: Any) -> None:
        def kill() -> None:
            while not doomed.worker._engine.requests:
                time.sleep(0.001)
            doomed.worker.shutdown()

        threading.Thread(target=kill, daemon=True).start()

    job = kit.make_job(tmp_path / "out.jsonl")
    kit.roll_out(job, engines=[doomed, engines[0]], on_engine=watch)
    kit.assert_same_samples(kit.read_rows(job.out), unbroken)


def test_samples_that_outgrow_the_pool_are_told(kit: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = kit.start_engine("small", kv_cache_tokens=32)
    params = SamplingParams(n=3, max_tokens=60, ignore_eos=True)
    tally = kit.roll_out(kit.make_job(tmp_path / "out.jsonl", params=params), engines=[small])
    small.worker.shutdown()
    assert tally.finish_reasons == {"abort": 36}
    (said,) = (record.getMessage() for record in caplog.records if "outgrew" in record.getMessage())
    assert "raise kv_cache_tokens" in said and "finish_reason abort" in said


def test_another_prompt_file_is_not_resumed(kit: Any, engines: list[Any], tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "1+2="}\n{"prompt": "2+2="}\n')
    job = kit.make_job(tmp_path / "out.jsonl", prompts=SourceSection(path=str(prompts)), verifier=None)
    kit.roll_out(job, engines=engines, rows=4)
    prompts.write_text('{"prompt": "2+2="}\n{"prompt": "1+2="}\n')
    with pytest.raises(BaseException) as error:
        kit.roll_out(job, engines=engines)
    assert isinstance(error.value, ConfigError) or error.group_contains(ConfigError, match="is not the one")


def test_another_precision_is_not_resumed(kit: Any, engines: list[Any], tmp_path: Path) -> None:
    job = kit.make_job(tmp_path / "out.jsonl", verifier=None)
    kit.roll_out(job, engines=engines, rows=4)
    for change in ({"dtype": "bfloat16"}, {"quantization": "int8"}, {"kv_cache_dtype": "int8"}):
        with pytest.raises(ConfigError, match=next(iter(change))):
            kit.roll_out(replace(job, engine=replace(job.engine, **change)), engines=engines)
    kit.roll_out(replace(job, engine=replace(job.engine, max_num_seqs=3)), engines=engines)


class Dry:
    """Answers at once, without a model."""

    name = "dry"

    def __init__(self) -> None:
        self.max_held = 0
        self._requests: list[RolloutRequest] = []
        self._arrived = threading.Condition()

    def submit(self, requests: list[RolloutRequest]) -> None:
        with self._arrived:
            self._requests += requests
            self.max_held = max(self.max_held, sum(len(request.sample_indices) for request in self._requests))
            self._arrived.notify_all()

    def drain(self, timeout_seconds: float) -> DrainReply:
        with self._arrived:
            self._arrived.wait_for(lambda: self._requests, timeout_seconds)
            requests, self._requests = self._requests, []
        samples = tuple(self._sample(request, index) for request in requests for index in request.sample_indices)
        return DrainReply(samples=samples, stats={}, queued=0)

    def abort(self, request_ids: list[str]) -> None:
        pass

    def _sample(self, request: RolloutRequest, index: int) -> RolloutSample:
        return RolloutSample(
            request_id=request.request_id,
            lease=request.lease,
            sample_index=index,
            worker=self.name,
            token_ids=np.zeros(2, np.int32),
            logprobs=np.zeros(2, np.float32),
            raw_logprobs=np.zeros(2, np.float32),
            version_spans=((0, 0, 2),),
            text="",
            finish_reason="length",
        )


@pytest.mark.parametrize("count", [5_000, pytest.param(1_000_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_memory_does_not_grow_with_the_prompts(kit: Any, tmp_path: Path, count: int) -> None:
    prompts = tmp_path / "p.jsonl"
    with prompts.open("w") as file:
        for index in range(count):
            file.write(f'{{"prompt": "{index}+2="}}\n')
    dry = Dry()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    first: list[float] = []

    def watch(roller: Any) -> None:
        keep = roller._files.write

        def write(rows: Any) -> None:
            first.append(time.perf_counter() - started) if not first else None
            keep(rows)

        roller._files.write = write

    job = kit.make_job(
        tmp_path / "out.jsonl",
        prompts=SourceSection(path=str(prompts)),
        params=SamplingParams(max_tokens=2),
        verifier=None,
        rows_per_file=100_000,
    )
    tally = kit.roll_out(job, engines=[kit.in_process(dry, "dry")], on_engine=watch)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{count} prompts in {time.perf_counter() - started:.0f} s, first row after {first[0]:.2f} s, {grown:.0f} MB")
    assert tally.num_samples == count and dry.max_held <= 10
    assert grown < 300 and first[0] < 10
