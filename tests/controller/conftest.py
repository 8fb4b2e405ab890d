"""Real prompts, a real engine in this process, and the only stand-in: a transport without Ray."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inference.worker import InferenceWorker
from olmorl.config.load import load_config
from olmorl.config.schema import Config
from olmorl.contract.generation import EngineConfig
from olmorl.controller.compose import Inputs, load_inputs

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"


class InProcess:
    """`Remote` without a cluster: the same `call`, answered by a worker of this process."""

    def __init__(self, worker: Any) -> None:
        self.name = worker.name
        self.worker = worker

    async def call(self, method: str, *args: Any, timeout: float) -> Any:
        async with asyncio.timeout(timeout):
            return await asyncio.to_thread(getattr(self.worker, method), *args)

    def kill(self) -> None:
        self.worker.shutdown()


def make_config(*overrides: str) -> Config:
    small = ["rollout.prompts_per_step=2", "rollout.samples_per_prompt=4", "eval.limit=4", "sync.canary_sequences=4"]
    return load_config(QUICKSTART, [*small, *overrides])


@pytest.fixture(autouse=True)
def _short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll that nobody waits for any more holds its thread, and so the end of the test."""
    monkeypatch.setattr("olmorl.controller.rollout.POLL_SECONDS", 0.3)


@pytest.fixture(scope="session")
def quickstart_config() -> Callable[..., Config]:
    """The quickstart in small; takes overrides."""
    return make_config


@pytest.fixture(scope="session")
def inputs() -> Inputs:
    return load_inputs(make_config())


@pytest.fixture
def start_engine() -> Iterator[Callable[[str], InProcess]]:
    """Starts an engine by name: the quickstart's model, serving version 0."""
    model, workers = make_config().model.path, []

    def start(name: str = "inference-0") -> InProcess:
        config = EngineConfig(model=model, max_num_seqs=16, kv_cache_tokens=4096, max_model_len=100, threads=1)
        workers.append(InferenceWorker(config, name=name, initial_version=0))
        return InProcess(workers[-1])

    yield start
    for worker in workers:
        worker.shutdown()


@pytest.fixture
def engine(start_engine: Callable[[str], InProcess]) -> InProcess:
    return start_engine("inference-0")
