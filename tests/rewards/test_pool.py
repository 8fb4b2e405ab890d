import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine
from pathlib import Path

import psutil
import pytest

from olmorl.contract.errors import ConfigError, WorkerError
from olmorl.rewards import Verdict, VerifierJob, VerifierPool, score

pytestmark = pytest.mark.timeout(60)


def job(completion: str, verifier: str = "own_verifiers:obey", truth: object = None) -> VerifierJob:
    return VerifierJob(verifier=verifier, completion=completion, ground_truth=truth)


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def run(coroutine: Coroutine) -> object:
    """Runs it, and then looks for processes left behind."""
    before = children()
    result = asyncio.run(coroutine)
    assert children() <= before
    return result


async def judge(*completions: str, timeout: float = 20.0, workers: int = 1) -> list[Verdict]:
    async with VerifierPool(["own_verifiers:obey"], workers=workers, timeout_seconds=timeout) as pool:
        return await pool.score([job(completion) for completion in completions])


@pytest.mark.parametrize(
    ("completion", "status", "reward", "detail"),
    [
        ("fine", "scored", 1.0, ""),
        ("true", "scored", 1.0, ""),
        ("false", "scored", 0.0, ""),
        ("numpy bool", "scored", 1.0, ""),
        ("numpy", "scored", 0.5, ""),
        ("int", "scored", 2.0, ""),
        ("nan", "error", None, "nan"),
        ("inf", "error", None, "inf"),
        ("none", "error", None, "no number"),
        ("text", "error", None, "no number"),
        ("raise", "error", None, "KeyError: 'lost'"),
        ("sys.exit", "error", None, "bye"),
        ("exit", "error", None, "exited with code 3"),
        ("crash", "error", None, "died of SIGSEGV"),
        ("fork", "scored", 1.0, ""),
        ("fork and exit", "scored", 1.0, ""),
        ("verdict of numpy", "scored", 0.5, ""),
        ("verdict of text", "error", None, "'1', which is no number"),
        ("unknown status", "error", None, "the status 'great'"),
        ("no detail", "error", None, "None"),
        ("surrogate", "error", None, "ValueError: \\udcff"),
        ("print", "scored", 1.0, ""),
        ("stdin", "scored", 0.0, ""),
        ("modules", "scored", 0.0, ""),
        ("x" * 1_000_000, "scored", 1.0, ""),
        ("\udcff\x00", "scored", 1.0, ""),
    ],
)
def test_whatever_a_verifier_does_is_a_verdict(own_verifiers, completion, status, reward, detail) -> None:
    verdicts = run(judge("a", completion, "b"))
    assert [verdict.reward for verdict in (verdicts[0], verdicts[2])] == [1.0, 1.0]
    assert (verdicts[1].status, verdicts[1].reward) == (status, reward)
    assert detail in verdicts[1].detail


def test_what_a_verifier_raises_says_where(own_verifiers, tmp_path: Path) -> None:
    """In its own file, whatever it called from there; the traceback has the rest."""
    source = "import json\n\ndef parse(truth):\n    return json.loads(truth)\n\n"
    source += "def judge(completion, truth, prompt):\n    return parse(truth)\n"
    (tmp_path / "parsing.py").write_text(source)

    async def main() -> Verdict:
        async with VerifierPool(["parsing:judge"]) as pool:
            [verdict] = await pool.score([job("", "parsing:judge", "{" + "x" * 9000)])
            return verdict

    verdict = run(main())
    assert verdict.detail.startswith("JSONDecodeError: Expecting property name")
    assert verdict.detail.endswith(f" ({tmp_path}/parsing.py:4)")
    assert verdict.traceback.startswith("Traceback") and "json/decoder.py" in verdict.traceback
    assert "Error" in verdict.traceback.splitlines()[-1]


@pytest.mark.parametrize("completion", ["hang", "hang in C", "hang without a chance"])
def test_an_overrun_is_killed_and_only_the_culprit_pays(own_verifiers, completion: str) -> None:
    start = time.monotonic()
    verdicts = run(judge(*"abc", completion, *"defgh", timeout=1.0))
    assert time.monotonic() - start < 5
    assert [verdict.status for verdict in verdicts] == ["scored"] * 3 + ["timeout"] + ["scored"] * 5
    assert verdicts[3].reward is None and "1 s" in verdicts[3].detail


def test_many_culprits_among_many(own_verifiers) -> None:
    completions = ["exit" if i % 7 == 3 else "hang" if i == 20 else "fine" for i in range(40)]
    verdicts = run(judge(*completions, timeout=1.0, workers=2))
    wanted = {"exit": "error", "hang": "timeout", "fine": "scored"}
    assert [verdict.status for verdict in verdicts] == [wanted[completion] for completion in completions]


def test_a_process_killed_from_outside_costs_no_verdict(own_verifiers, tmp_path: Path) -> None:
    async def main() -> VerifierPool:
        async with VerifierPool(["own_verifiers:obey"]) as pool:
            [verdict] = await pool.score([job("crash once", truth=str(tmp_path / "flag"))])
            assert verdict.reward == 1.0
            [idle] = children() - before
            os.kill(idle, signal.SIGKILL)
            assert (await pool.score([job("fine")]))[0].reward == 1.0
            return pool

    before = children()
    pool = run(main())
    assert pool.counts == {"scored": 2, "restarts": 2}


def test_the_event_loop_is_never_blocked(own_verifiers) -> None:
    async def main() -> float:
        async with VerifierPool(["own_verifiers:obey"], timeout_seconds=1.0) as pool:
            scoring = asyncio.create_task(pool.score([job("hang"), job("exit"), job("x" * 10_000_000)]))
            longest, last = 0.0, time.monotonic()
            while not scoring.done():
                await asyncio.sleep(0.01)
                longest, last = max(longest, time.monotonic() - last), time.monotonic()
            return longest

    assert run(main()) < 0.5


def test_own_deadline_of_a_call_and_cancellation(own_verifiers) -> None:
    async def main() -> None:
        async with VerifierPool(["own_verifiers:obey"], timeout_seconds=30) as pool:
            [verdict] = await pool.score([job("hang")], timeout_seconds=0.5)
            assert verdict.status == "timeout"
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await pool.score([job("fine")] * 1000 + [job("hang")], timeout_seconds=0.5)
            assert (await pool.score([job("fine")]))[0].reward == 1.0
            hanging = asyncio.create_task(pool.score([job("hang")]))
            await asyncio.sleep(0)
        with pytest.raises(WorkerError, match="closed"):
            await hanging
        with pytest.raises(WorkerError, match="closed"):
            await pool.score([job("fine")])

    run(main())


def test_works_in_another_thread(own_verifiers) -> None:
    verdicts: list[Verdict] = []
    thread = threading.Thread(target=lambda: verdicts.extend(asyncio.run(judge("hang", "exit", "fine", timeout=0.5))))
    thread.start()
    thread.join()
    assert [verdict.status for verdict in verdicts] == ["timeout", "error", "scored"]


@pytest.mark.parametrize(
    ("verifier", "words"),
    [
        ("own_verifiers:obez", ["own_verifiers", "did you mean 'obey'"]),
        ("own_verifiers:number", ["int", "cannot be called"]),
        ("no_such_module_here:f", ["no_such_module_here", "Python path"]),
        ("broken_verifiers:f", ["no_such_library_at_all", "broken_verifiers.py:1"]),
        ("failing_verifiers:f", ["RuntimeError: no licence", "failing_verifiers.py:1"]),
        ("own_verifiers:two", ["must take (completion, ground_truth, prompt); it takes (completion, ground_truth)"]),
    ],
)
def test_what_cannot_be_loaded_is_said_at_the_start(own_verifiers, verifier: str, words: list[str]) -> None:
    async def main() -> str:
        with pytest.raises(ConfigError) as caught:
            await VerifierPool([verifier], workers=2).start()
        return str(caught.value)

    message = run(main())
    for word in words:
        assert word in message


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match="did you mean 'gsm8k'"):
        VerifierPool(["gsm9k"])
    with pytest.raises(ConfigError, match=r"'my\.rewards\.sum'; one of your own is given as my\.rewards:sum"):
        VerifierPool(["my.rewards.sum"])
    with pytest.raises(ConfigError, match=r"'q9q9q9'; one of your own is given as my_module:my_function; built in"):
        VerifierPool(["q9q9q9"])

    async def main() -> None:
        async with VerifierPool(["gsm8k"]) as pool:
            with pytest.raises(ConfigError, match="'regex' is not loaded"):
                await pool.score([job("x", verifier="regex")])
            assert await pool.score([]) == []

    run(main())


def test_score_counts_words_for_who_asks_for_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counting.py").write_text("def judge(completion, truth, prompt, num_tokens):\n    return num_tokens\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert score("counting:judge", completion="three short words", ground_truth=None).reward == 3.0


def test_score_blocks_and_answers(own_verifiers) -> None:
    assert score("gsm8k", completion="so 7", ground_truth="7") == Verdict(
        status="scored", reward=1.0, detail="answer 7, label 7"
    )
    assert score("own_verifiers:Judge", completion="x", ground_truth=None, prompt="p").reward == 0.25
    assert score("own_verifiers:obey", completion="hang", ground_truth=None, timeout=0.5).status == "timeout"
    with pytest.raises(ConfigError, match="did you mean 'gsm8k'"):
        score("gsm8", completion="x", ground_truth="7")

    async def inside_a_loop() -> Verdict:
        return score("gsm8k", completion="so 7", ground_truth="8")

    assert asyncio.run(inside_a_loop()).reward == 0.0


DRIVER = """
import asyncio, sys
from olmorl.rewards import VerifierJob, VerifierPool
async def main():
    pool = VerifierPool(["own_verifiers:obey"], workers=2)
    await pool.start()
    print("ready", flush=True)
    work, flag = sys.argv[1:]
    job = VerifierJob(verifier="own_verifiers:obey", completion=work, ground_truth=flag)
    await asyncio.gather(pool.score([job]), pool.score([job]))
    await asyncio.sleep(60)
asyncio.run(main())
"""


def wait_until(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


@pytest.mark.parametrize("work", ["fine", "hang", "hang in C", "spawn"])
def test_no_process_outlives_a_killed_driver(own_verifiers, tmp_path: Path, work: str) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    flag = tmp_path / "pid"
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, work, str(flag)], stdout=subprocess.PIPE, env=env)
    assert driver.stdout is not None and driver.stdout.readline() == b"ready\n"
    if work == "spawn":
        wait_until(lambda: flag.exists() and flag.read_text())
    family = psutil.Process(driver.pid).children(recursive=True)
    assert len(family) >= 2
    driver.kill()
    driver.wait()
    driver.stdout.close()
    wait_until(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in family))


def test_score_leaves_nothing_behind_and_no_noise(own_verifiers) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    code = (
        "import sys; from olmorl.rewards import score\n"
        "assert score('gsm8k', completion='7', ground_truth='7').reward == 1\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'ray', 'transformers')))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "always::ResourceWarning", "-c", code], env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("verifier", ["gsm8k", "math"])
def test_throughput(verifier: str) -> None:
    async def main() -> float:
        async with VerifierPool([verifier], workers=2) as pool:
            group = [job(f"{'step 1, step 2. ' * 20} #### {i}", verifier, str(i)) for i in range(8)]
            await pool.score(group)
            start = time.perf_counter()
            verdicts = await asyncio.gather(*(pool.score(group) for _ in range(500)))
            assert all(verdict.reward == 1.0 for group in verdicts for verdict in group)
            return 4000 / (time.perf_counter() - start)

    rate = run(main())
    print(f"{rate:.0f} {verifier} verdicts a second")
    assert rate > 500  # 2,000 and more when no one else uses the cores
