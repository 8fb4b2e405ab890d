"""A run killed at random moments, again and again, and resumed: as if nothing had happened."""

import random
import signal
import time
from collections import Counter
from functools import partial
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)

SETTINGS = (
    "data.shuffle=false",
    "rollout.prompts_per_step=2",
    "inference.max_num_seqs=6",
    "sync.canary_sequences=8",
    "eval.limit=4",
    "checkpoint.export=false",
)
SYNCHRONOUS = ("rollout.async_steps=0", "rollout.active_sampling=false")


def kill_at(command: Any, *, step: int, delay: float, settings: tuple[str, ...], resume: bool) -> None:
    """Kill the driver `delay` seconds after the row of `step` is there: wherever it is by then."""
    attempt = command.directory / "logs" / f"attempt_{1 + len(list(command.directory.glob('logs/attempt_*')))}"
    process = command.start(*settings, *(["--resume"] if resume else []))
    command.wait_for(lambda: attempt.exists() and command.has_row(step), process)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.wait()


def trained(command: Any) -> Counter[tuple[str, int, tuple[int, ...]]]:
    """What was trained: prompt, sample, tokens."""
    return Counter(
        (row.prompt_id, row.sample, tuple(row.token_ids)) for row in command.rollouts() if row.fate == "trained"
    )


@pytest.mark.soak
def test_killed_once(command: Any, checks: Any) -> None:
    """What is done again is what was done before: the same tokens in the same steps."""
    settings = (*SETTINGS, *SYNCHRONOUS, "checkpoint.every=3", "eval.every=1", "optim.schedule=constant")
    process = command.start(*settings, "run.steps=1000")
    kept, done = 0, 4
    while kept == 0 or done <= kept:  # until a step is done that no checkpoint has
        process.send_signal(signal.SIGCONT)
        command.wait_for(partial(command.has_row, done + 1), process)
        process.send_signal(signal.SIGSTOP)  # so that nothing moves while we look
        kept = max(
            (int(path.parent.name[5:]) for path in command.directory.glob("checkpoints/step_*/COMPLETE")), default=0
        )
        done = max(row.step for row in command.rollouts())
    process.kill()
    process.wait()
    before = {(row.step, row.prompt_id, row.sample): row for row in command.rollouts() if row.step > kept}
    assert {step for step, _, _ in before} == set(range(kept + 1, done + 1))
    command.run(*settings, f"run.steps={done}", "--resume")  # at once
    checks.invariants(command, done, driver_killed=True)
    after = {(row.step, row.prompt_id, row.sample): row for row in command.rollouts() if row.step > kept}
    assert {row.attempt for row in after.values()} == {2} and after.keys() == before.keys()
    for key, row in before.items():
        again = after[key]
        assert again.token_ids.tolist() == row.token_ids.tolist() and again.logprobs.tolist() == row.logprobs.tolist()
        assert (again.seed, again.reward, again.advantage) == (row.seed, row.reward, row.advantage)
    assert all("eval/heldout/avg_at_k" in row for row in command.metrics()), "an evaluation was lost"
    assert command.summary()["waste"]["rolled_back"] > 0


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_killed_ten_times_in_thirty_steps(command_in: Any, checks: Any, tmp_path: Any, mode: str) -> None:
    seed = time.time_ns() % 10**6
    print(f"seed {seed}")
    moments = random.Random(seed)
    kind = SYNCHRONOUS if mode == "synchronous" else ("rollout.async_steps=2",)
    settings = (*SETTINGS, *kind, "run.steps=30", "checkpoint.every=2")
    (tmp_path / "killed").mkdir()
    command = command_in(tmp_path / "killed")
    for number in range(10):
        step = 3 * number + moments.randint(0, 2)
        kill_at(command, step=step, delay=moments.uniform(0, 0.3), settings=settings, resume=number > 0)
    command.run(*settings, "--resume")
    checks.invariants(command, 30, driver_killed=True)
    if mode == "synchronous":
        (tmp_path / "undisturbed").mkdir()
        undisturbed = command_in(tmp_path / "undisturbed")
        undisturbed.run(*settings)
        checks.invariants(undisturbed, 30)
        assert trained(command) == trained(undisturbed)
