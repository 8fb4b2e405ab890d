"""Runs that stand still at a known moment, so that a fault can strike there and nowhere else.

The verifier of these runs is a gate: it lets so many verdicts through and then waits until a file is gone. Without
verdicts nothing is trained, and without training no update is sent; so a test knows what the run does and does not do
while the gate is shut.
"""

import contextlib
import re
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

GATE = '''
import time
import zlib
from pathlib import Path

FOLDER = Path(__file__).parent

def judge(completion, truth, prompt):
    """Pays by a hash of the answer: most groups carry signal, and every run pays the same."""
    if not completion:  # as the check of the ground truths asks, before anything starts
        return 0
    with open(FOLDER / "verdicts", "ab") as verdicts:
        given = verdicts.tell()
        if (FOLDER / "shut").exists() and given >= int((FOLDER / "shut").read_text()):
            (FOLDER / "asked").touch()
            while (FOLDER / "shut").exists():
                time.sleep(0.005)
        verdicts.write(b".")
    return zlib.crc32(completion.encode()) % 2
'''

SETTINGS = (
    "reward.verifier=gate:judge",
    "reward.timeout_seconds=20",
    "data.shuffle=false",
    "eval.data=[]",
    "rollout.prompts_per_step=2",
    "inference.workers=2",
    "sync.canary_sequences=8",
    "checkpoint.every=1",
    "checkpoint.export=false",
    "run.steps=4",
)
PROMPTS, SAMPLES, STEPS = 2, 4, 4
HEARTBEAT_SECONDS = 5.0


@dataclass
class Stage:
    """A run with a gate."""

    command: Any
    process: subprocess.Popen[bytes] | None = None
    settings: tuple[str, ...] = ()
    held: psutil.Process | None = None
    """the worker that holds an update up"""

    def start(self, *settings: str, shut_after: int | None = None) -> None:
        """`shut_after` so many verdicts the gate is shut; None leaves it open."""
        (self.command.folder / "gate.py").write_text(GATE)
        if shut_after is not None:
            (self.command.folder / "shut").write_text(str(shut_after))
        self.settings = (*SETTINGS, f"cluster.heartbeat_seconds={HEARTBEAT_SECONDS}", *settings)
        self.process = self.command.start(*self.settings)

    def wait_for(self, what: Callable[[], bool]) -> None:
        assert self.process is not None, "start() first"
        self.command.wait_for(what, self.process)

    def wait_at_gate(self) -> None:
        self.wait_for((self.command.folder / "asked").exists)

    def open_gate(self) -> None:
        (self.command.folder / "shut").unlink()

    def wait_for_words(self, pattern: str) -> None:
        self.wait_for(lambda: re.search(pattern, self.command.err) is not None)

    def end(self, code: int = 0) -> None:
        assert self.process is not None, "start() first"
        self.command.end(self.process, code=code)

    def resume(self, *settings: str, code: int = 0) -> None:
        self.process = self.command.start(*self.settings, *settings, "--resume")
        self.end(code)

    # Moments. Each returns the settings that it needs, and then brings the run there.

    def reach(self, moment: str, *settings: str) -> None:
        {"before": self._before, "during": self._during, "after": self._after}[moment](*settings)

    def leave(self, moment: str) -> None:
        """Let the run go on."""
        if self.held is None:
            self.open_gate()
        else:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.held.resume()

    def _before(self, *settings: str) -> None:
        """Prompts are being answered; the first weights are live, and nothing can be trained."""
        self.start("rollout.async_steps=2", *settings, shut_after=0)
        self.wait_at_gate()

    def _during(self, *settings: str) -> None:
        """The first trained weights are on their way to both engines, and one of them stands still.

        Of the six groups in hand three are with the other, which are enough for a batch.
        """
        self.start("rollout.async_steps=2", "rollout.active_sampling=false", *settings, shut_after=0)
        self.wait_at_gate()
        self.held = self.command.worker("inference-1")
        self.held.suspend()
        self.open_gate()
        self.wait_for_words(r"version 1 waits for inference-1 to")

    def _after(self, *settings: str) -> None:
        """The first trained weights are live, the second batch cannot be trained."""
        batch = PROMPTS * SAMPLES
        self.start("rollout.async_steps=0", "rollout.active_sampling=false", *settings, shut_after=batch)
        self.wait_at_gate()  # the second batch was admitted when the first update was live
        self.wait_for(lambda: self.command.has_row(1))

    # Faults

    def strike(self, target: str, number: signal.Signals) -> None:
        """`target`: the name of a worker, "driver" or "verifier"; nothing for a worker that was replaced already."""
        assert self.process is not None, "start() first"
        if target == "driver":
            self.process.send_signal(number)
        elif target == "verifier":
            self.command.verifier().send_signal(number)
        else:
            self.command.worker(target).send_signal(number)

    def strike_when_there(self, worker: str, number: signal.Signals) -> None:
        """Wait until the worker has begun to start."""

        def there() -> bool:
            return any((self.command.directory / "logs").glob(f"attempt_*/{worker}.log"))

        self.wait_for(there)
        self.strike(worker, number)


@pytest.fixture
def stage(command: Any) -> Stage:
    return Stage(command)
