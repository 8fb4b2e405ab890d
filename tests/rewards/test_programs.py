"""Verdicts on programs, by the sandbox and by a code server."""

import asyncio
import json

import pytest

from olmorl.contract.errors import ConfigError
from olmorl.rewards import VerifierJob, VerifierPool, score
from olmorl.rewards.program import CodeStdioVerifier, CodeVerifier, read_io_tests, same_output
from olmorl.rewards.settings import VerifierSettings

pytestmark = pytest.mark.timeout(90)
SETTINGS = VerifierSettings(code_api_url=None, code_seconds=0.5, code_memory_mb=300)
ASSERTIONS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(0, 0) == 0", "assert add(2, 2) == 4"]
IO = [{"input": "1 2\n", "output": "3\n"}, {"input": "4 5\n", "output": "9"}]


def fenced(source: str) -> str:
    return f"Here is my program:\n```python\n{source}\n```\nIt works."


@pytest.mark.parametrize(
    ("source", "reward", "detail"),
    [
        ("def add(a, b): return a + b", 1.0, "4 of 4"),
        ("def add(a, b): return 0", 0.5, "AssertionError"),
        ("def add(a, b): return a - b", 0.25, "AssertionError"),
        ("def add(a, b):\n  if a == 1:\n    while True: pass\n  return a + b", 0.75, "limit of time"),
        ("def add(a, b): return bytearray(10**10)", 0.0, "MemoryError"),
        ("def add(a, b):", 0.0, "IndentationError"),
        ("def sub(a, b): return a - b", 0.0, "NameError"),
        ("import sys\nsys.exit(0)", 0.0, "ended before its test"),
        ("import os\nos._exit(0)", 0.0, "ended before its test"),
        ("raise SystemExit", 0.0, "ended before its test"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", 0.0, "ended by signal 9"),
        ("print('all tests passed')", 0.0, "NameError"),
    ],
)
def test_code(source: str, reward: float, detail: str) -> None:
    verdict = CodeVerifier(SETTINGS)(fenced(source), json.dumps(ASSERTIONS))
    assert (verdict.status, verdict.reward) == ("scored", reward) and detail in verdict.detail, verdict


@pytest.mark.parametrize(
    ("source", "reward"),
    [
        ("print(sum(map(int, input().split())))", 1.0),
        ("a, b = map(int, input().split())\nprint(a + b, end='  \\n\\n')", 1.0),
        ("print(3)", 0.5),
        ("print('sum:', sum(map(int, input().split())))", 0.0),
        ("import sys\nprint(sum(map(int, input().split())))\nsys.exit()", 1.0),
        ("print(sum(map(int, input().split())))\n1/0", 0.0),
        ("import sys\nprint(sum(map(int, input().split())))\nsys.exit(1)", 0.0),
        ("input(); input()", 0.0),
    ],
)
def test_code_stdio(source: str, reward: float) -> None:
    verdict = CodeStdioVerifier(SETTINGS)(fenced(source), IO)
    assert (verdict.status, verdict.reward) == ("scored", reward), verdict


def test_where_the_program_is_looked_for() -> None:
    code = CodeVerifier(SETTINGS)
    right = "def add(a, b): return a + b"
    assert code(f"```\n1/0\n```\nbetter:\n```python\n{right}\n```", ASSERTIONS).reward == 1.0
    assert code(right, ASSERTIONS).reward == 1.0
    assert code(f"<think>```\n1/0\n```</think>```py\n{right}", ASSERTIONS).reward == 1.0
    for nothing in ("", "```\n```", "<think>x</think>  "):
        assert code(nothing, ASSERTIONS).detail == "no program in the completion"
        assert CodeStdioVerifier(SETTINGS)(nothing, IO).reward == 0.0


def test_threshold_and_exhausted_budget() -> None:
    strict = CodeVerifier(VerifierSettings(code_api_url=None, code_seconds=0.5, code_pass_threshold=0.99))
    assert strict(fenced("def add(a, b): return a + b"), ASSERTIONS).reward == 1.0
    assert strict(fenced("def add(a, b): return 0"), ASSERTIONS).reward == 0.0
    slow = CodeVerifier(VerifierSettings(code_api_url=None, code_seconds=0.5, timeout_seconds=3.0))
    verdict = slow("while True: pass", ASSERTIONS * 20)
    assert (verdict.status, verdict.reward) == ("scored", 0.0)


@pytest.mark.parametrize("bad", [None, 3, [], "", "[]", [3], {"a": 1}, '{"a": 1}', [" "]])
def test_no_tests_are_unscorable(bad: object) -> None:
    assert CodeStdioVerifier(SETTINGS)("x", bad).status == "unscorable"
    if not isinstance(bad, str) or not bad.startswith("{"):
        assert CodeVerifier(SETTINGS)("x", bad).status == "unscorable"


def test_spellings_of_io_tests() -> None:
    assert read_io_tests({"inputs": ["1", ["2", "3"]], "outputs": [1, ["4"]]}) == read_io_tests(
        json.dumps([{"input": "1", "output": "1"}, {"input": "2\n3", "output": "4"}])
    )
    assert read_io_tests({"inputs": ["1"], "outputs": []}) is None


def test_same_output() -> None:
    assert same_output("1 2\n3\n\n", "1  2 \n3") and same_output("", "\n")
    assert not same_output("1 2 3", "1 2\n3") and not same_output("1", "1.0") and not same_output("", "1")


def test_in_a_verifier_process_and_killed_with_it() -> None:
    verdict = score("code", completion="def add(a, b): return a + b", ground_truth=ASSERTIONS)
    assert verdict.reward == 1.0
    late = score("code", completion="while True: pass", ground_truth=ASSERTIONS * 100, timeout=2.0)
    assert late.status == "timeout" and late.reward is None


def test_code_server(serve) -> None:
    async def main() -> None:
        settings = VerifierSettings(code_api_url=server.url + "/test_program")
        async with VerifierPool(["code", "code_stdio"], settings=settings, timeout_seconds=10) as pool:
            jobs = [
                VerifierJob(verifier="code", completion=fenced("x = 1"), ground_truth=ASSERTIONS),
                VerifierJob(verifier="code_stdio", completion=fenced("x = 1"), ground_truth=IO),
                VerifierJob(verifier="code", completion="", ground_truth=ASSERTIONS),
                VerifierJob(verifier="code", completion="x", ground_truth=None),
            ]
            verdicts = await pool.score(jobs)
            assert [v.reward for v in verdicts] == [0.75, 0.5, 0.0, None]
            assert verdicts[3].status == "unscorable"
            server.answer = lambda path, body: (200, {"results": [1]})
            assert (await pool.score(jobs[:1]))[0].status == "error"
            server.answer = lambda path, body: (400, {"detail": "no"})
            [refused] = await pool.score(jobs[:1])
            assert refused.status == "error" and "HTTP 400" in refused.detail

    def answer(path: str, body: dict) -> tuple[int, object]:
        assert body["program"].strip() == "x = 1" and body["max_execution_time"] == 1.0
        assert body["tests"] == (IO if path == "/test_program_stdio" else ASSERTIONS)
        return 200, {"results": [1, 0] if path == "/test_program_stdio" else [1, 1, 0, 1], "runtimes": []}

    server = serve(answer)
    asyncio.run(main())
    assert {path for path, _ in server.requests} == {"/test_program", "/test_program_stdio"}


def test_a_broken_url_of_the_code_server_is_said() -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match=r"code_api_url.*ftp://x"):
            await VerifierPool(["code"], settings=VerifierSettings(code_api_url="ftp://x")).start()

    asyncio.run(main())
