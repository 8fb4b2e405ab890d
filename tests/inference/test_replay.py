"""A schedule that was recorded under real timing comes out the same when it is done again in one thread."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from inference.replay import replay_schedule
from inference.staged_update import stage_tensors
from inference.worker import InferenceWorker
from olmorl.contract.errors import ConfigError
from olmorl.contract.generation import EngineConfig, RolloutRequest, SamplingParams


def record(model_folder: str, folder: Path) -> Path:
    """Requests from two threads and updates, whenever the engine happens to take them; then an abort."""
    config = EngineConfig(
        model=model_folder,
        max_num_seqs=6,
        kv_cache_tokens=256,
        max_tokens_per_step=24,
        threads=1,
        schedule_dir=str(folder),
    )
    worker = InferenceWorker(config, name="engine-0")
    engine = worker._engine

    def submit(offset: int) -> None:
        rng = np.random.default_rng(offset)
        for number in range(offset, offset + 12):
            params = SamplingParams(n=3, max_tokens=rng.integers(5, 40), seed=number, temperature=0.9, top_k=12)
            prompt = rng.integers(0, 20, int(rng.integers(1, 30))).astype(np.int32)
            worker.submit(
                [
                    RolloutRequest(
                        request_id=str(number), lease=1, prompt_token_ids=prompt, params=params, sample_indices=(0, 2)
                    )
                ]
            )
            worker.drain(0.002)

    def update(version: int) -> None:
        rng = np.random.default_rng(version)
        named = [
            (s.name, torch.from_numpy(rng.normal(0, 0.2, s.shape).astype(np.float32))) for s in worker.info().tensors
        ]
        staged = stage_tensors(named, worker.info().tensors, device=torch.device("cpu"))
        worker._call(lambda: engine.commit(staged, version, kv="recompute" if version % 2 else "keep"))

    threads = [threading.Thread(target=submit, args=(offset,)) for offset in (0, 100)]
    for thread in threads:
        thread.start()
    for version in range(3):
        update(version)
        worker.drain(0.01)
    for thread in threads:
        thread.join()
    meet_in_mid_sample(worker, update)
    assert worker.wait_idle(60)
    worker.shutdown()
    return folder / "engine-0.jsonl"


def meet_in_mid_sample(worker: InferenceWorker, update: Callable[[int], None]) -> None:
    """While nobody else has the engine: updates of both kinds, and an abort, of a sample that is half done."""
    assert worker.wait_idle(60)
    worker.pause()
    params = SamplingParams(n=2, max_tokens=80, seed=7, ignore_eos=True)
    prompt = np.arange(5, dtype=np.int32)
    worker.submit(
        [
            RolloutRequest(request_id=name, lease=1, prompt_token_ids=prompt, params=params, sample_indices=(0, 1))
            for name in ("long", "given up")
        ]
    )
    for version in (3, 4):  # recomputed, then kept
        for _ in range(4):
            assert worker._call(worker._engine.step) == []
        update(version)
    worker.abort(["given up", "unknown"])
    worker.resume()


@pytest.fixture(scope="module")
def recorded(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(model_folder, tmp_path_factory.mktemp("schedule"))


def test_a_recorded_schedule_comes_out_the_same(recorded: Path) -> None:
    events = [json.loads(line) for line in recorded.read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    assert [event["event"] for event in events].count("update") == 5
    report = replay_schedule(recorded)
    assert report.divergence is None, str(report)
    assert (report.steps, report.updates) == (len(steps), 5)
    assert (
        report.tokens == sum(len(tokens) for event in steps for _, _, tokens in event["drawn"]) >= 44
    )  # 22 were not aborted
    assert str(report).startswith("identical: ")


def test_what_differs_is_told(recorded: Path, tmp_path: Path) -> None:
    (tmp_path / "weights").symlink_to(recorded.parent / "weights")
    lines = recorded.read_text().splitlines()
    at, step, event = next(
        (i, number, json.loads(line))
        for number, (i, line) in enumerate((i, line) for i, line in enumerate(lines) if '"event":"step"' in line)
        if number > 20 and json.loads(line)["drawn"]
    )
    event["drawn"][-1][2][0] += 1
    changed = tmp_path / "changed.jsonl"
    changed.write_text("\n".join([*lines[:at], json.dumps(event), *lines[at + 1 :]]))
    report = replay_schedule(changed)
    assert report.divergence is not None and report.divergence.step == step
    assert f"drawn (request, sample, tokens) ({event['drawn'][-1][0]!r}" in str(report)

    changed.write_text("\n".join(line for line in lines if '"event":"add","request":"long"' not in line))
    assert "computed" in str(replay_schedule(changed)), "a request that never came made no difference"

    changed.write_text("\n".join([*lines[:at], lines[at][:-9]]))  # a crash cut it short
    assert replay_schedule(changed).steps == step
    changed.write_text("\n".join([lines[0][:-9], *lines[1:]]))
    with pytest.raises(ConfigError, match="line 1, is not JSON"):
        replay_schedule(changed)


def test_without_weights_or_a_record_it_says_so(recorded: Path, tmp_path: Path) -> None:
    (tmp_path / "alone.jsonl").write_text(recorded.read_text())
    with pytest.raises(ConfigError, match=r"version_000000\.safetensors is missing"):
        replay_schedule(tmp_path / "alone.jsonl")
    with pytest.raises(ConfigError, match="cannot read"):
        replay_schedule(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no recorded schedule"):
        replay_schedule(tmp_path / "empty.jsonl")
