"""A tensor-parallel group is one failure unit: whoever of it dies, all of it is gone within seconds."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from inference import LLM, SamplingParams
from inference.worker import InferenceWorker
from olmorl.contract.errors import ConfigError, WorkerError
from olmorl.contract.generation import EngineConfig

SECONDS = 10.0  # on a machine as busy as may be
LEADER = """
import sys, time
from inference import LLM
llm = LLM(sys.argv[1], tensor_parallel_size=2, threads=1)
print(llm.engine.followers._processes[0].pid, flush=True)
time.sleep(600)
"""


def within_seconds(what: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SECONDS
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_follower_that_dies_ends_the_steps_of_its_leader(model_folder: str) -> None:
    llm = LLM(model_folder, tensor_parallel_size=2, threads=1)
    assert llm.engine.followers is not None
    (process,) = llm.engine.followers._processes
    llm.add_request([1, 2, 3], SamplingParams(max_tokens=120, ignore_eos=True))
    for _ in range(3):
        llm.step()
    started = time.monotonic()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="tensor-parallel"):
        while llm.has_unfinished():
            llm.step()
    assert time.monotonic() - started < SECONDS
    with pytest.raises(WorkerError, match="tensor-parallel"):
        llm.score([[1, 2, 3]])  # type: ignore[list-item]


def test_a_worker_that_is_idle_says_so_too_and_one_that_is_shut_down_leaves_nobody(model_folder: str) -> None:
    config = EngineConfig(model=model_folder, tensor_parallel_size=2, threads=1)
    worker = InferenceWorker(config, name="engine-0")
    assert worker.info().devices == 2
    assert worker.info().tensors == InferenceWorker(EngineConfig(model=model_folder), name="one").info().tensors
    followers = worker._engine.followers
    assert followers is not None
    worker.ping()
    (process,) = followers._processes
    process.kill()

    def fails() -> bool:
        try:
            worker.ping()
        except WorkerError as error:
            return "tensor-parallel rank 1 of 2 died" in str(error)
        return False

    assert within_seconds(fails)
    worker.shutdown()
    assert process.poll() is not None


def test_followers_end_with_a_leader_that_is_killed(model_folder: str) -> None:
    leader = subprocess.Popen([sys.executable, "-c", LEADER, model_folder], stdout=subprocess.PIPE, text=True)
    assert leader.stdout is not None
    follower = int(leader.stdout.readline())
    assert psutil.pid_exists(follower)
    leader.kill()
    leader.wait()
    assert within_seconds(lambda: not _runs(follower))


def test_a_forgotten_engine_leaves_nobody(model_folder: str) -> None:
    llm = LLM(model_folder, tensor_parallel_size=2, threads=1)
    assert llm.engine.followers is not None
    (process,) = llm.engine.followers._processes
    del llm
    assert within_seconds(lambda: process.poll() is not None)


def test_what_cannot_be_started_is_refused_before_any_process_is(model_folder: str) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size is 3, which does not divide"):
        LLM(model_folder, tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 0"):
        LLM(model_folder, tensor_parallel_size=0)
    with pytest.raises(ConfigError, match="one rank"):
        LLM(model_folder, tensor_parallel_size=2, deterministic=True)


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
