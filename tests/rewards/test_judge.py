"""A judge behind a real HTTP endpoint, which answers, refuses, stalls and goes away."""

import asyncio
import json
import socket
import time

import pytest

from olmorl.contract.errors import ConfigError
from olmorl.rewards import Verdict, VerifierJob, VerifierPool
from olmorl.rewards.judge import read_rubric, read_score
from olmorl.rewards.settings import VerifierSettings
from olmorl.rewards.verifier import JUDGES

pytestmark = pytest.mark.timeout(60)


def reply(text: object) -> tuple[int, object]:
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}


def settings(url: str, **more) -> VerifierSettings:
    return VerifierSettings(judge_url=url + "/v1", judge_model="m", judge_api_key="k", **more)


def job(completion: str = "fine", verifier: str = "judge", truth: object = "ref", prompt: str = "q") -> VerifierJob:
    return VerifierJob(verifier=verifier, completion=completion, ground_truth=truth, prompt=prompt)


def judge(config: VerifierSettings, *jobs: VerifierJob, timeout: float = 10.0) -> list[Verdict]:
    async def main() -> list[Verdict]:
        names = {j.verifier for j in jobs}
        async with VerifierPool(names, settings=config, timeout_seconds=timeout) as pool:
            return await pool.score(jobs)

    return asyncio.run(main())


def test_score_is_a_tenth_and_the_request_is_openais(serve) -> None:
    server = serve(lambda path, body: reply('good. {"reason": "clear", "score": 7}'))
    [verdict] = judge(settings(server.url), job("my <answer>fine</answer>"))
    assert (verdict.status, verdict.reward) == ("scored", 0.7)
    [(path, body)] = server.requests
    assert path == "/v1/chat/completions" and body["model"] == "m" and server.headers["authorization"] == "Bearer k"
    [message] = body["messages"]
    assert message["role"] == "user" and all(part in message["content"] for part in ("q", "fine", "ref"))


@pytest.mark.parametrize("name", [name for name in JUDGES if name != "rubric"])
def test_every_kind(serve, name: str) -> None:
    server = serve(lambda path, body: reply('{"score": 10}'))
    assert judge(settings(server.url), job(verifier=name))[0].reward == 1.0
    [without] = judge(settings(server.url), job(verifier=name, truth=""))
    assert without.status in ("scored", "unscorable")
    assert judge(settings(server.url), job("<think>x</think>", verifier=name))[0].reward == 0.0


def test_rubric_is_a_weighted_mean(serve) -> None:
    server = serve(lambda path, body: reply("2" if "[Criterion]\nkind" in body["messages"][0]["content"] else "1"))
    rubric = {"query": "q", "rubrics": [{"description": "kind", "weight": 3}, {"description": "short", "weight": 1}]}
    [verdict, bad] = judge(
        settings(server.url),
        job(verifier="rubric", truth=json.dumps(rubric)),
        job(verifier="rubric", truth="kind"),
    )
    assert verdict.reward == (3 * 1.0 + 1 * 0.5) / 4 and bad.status == "unscorable"
    for nothing in (None, [], {}, {"rubrics": []}, {"rubrics": [{"description": "x", "weight": 0}]}):
        assert read_rubric(nothing) is None


def test_equal_questions_are_asked_once(serve) -> None:
    server = serve(lambda path, body: reply('{"score": 5}'))
    verdicts = judge(settings(server.url), *[job()] * 20, *[job("other")] * 20)
    assert {verdict.reward for verdict in verdicts} == {0.5} and len(server.requests) == 2


def test_a_judge_that_stumbles_is_asked_again(serve) -> None:
    replies = iter([(503, {}), (429, {}), (500, {}), reply('{"score": 3}')])
    server = serve(lambda path, body: next(replies))
    [verdict] = judge(settings(server.url), job())
    assert verdict.reward == 0.3 and len(server.requests) == 4


def test_a_judge_that_is_down_makes_a_timeout_and_never_a_zero() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    start = time.monotonic()
    verdicts = judge(settings(url), *[job(str(i)) for i in range(50)], timeout=1.5)
    assert {(v.status, v.reward) for v in verdicts} == {("timeout", None)}
    assert "ConnectError" in verdicts[0].detail and time.monotonic() - start < 10


def test_a_judge_that_stalls_holds_up_no_one_else(serve) -> None:
    server = serve(lambda path, body: reply('{"score": 1}'), stall=lambda body: "slow" in str(body))
    slow, fast = judge(settings(server.url), job("slow"), job("fast"), timeout=1.5)
    assert (slow.status, fast.reward) == ("timeout", 0.1)


def test_a_judge_that_is_silent_is_down(serve) -> None:
    """It takes connections and answers none: no failure but that of time."""

    async def main() -> list[tuple[float, str]]:
        async with VerifierPool(["judge"], settings=settings(server.url), timeout_seconds=0.5) as pool:
            outages = []
            for n in range(3):
                verdicts = await pool.score([job(str(n)), job(f"{n}b")])
                assert {v.status for v in verdicts} == {"timeout"}
                outages.append(pool.outage())
            await pool.score([job("fast")], timeout_seconds=10)
            return [*outages, pool.outage()]

    server = serve(lambda path, body: reply("5"), stall=lambda body: "fast" not in str(body))
    outages = asyncio.run(main())
    seconds = [down for down, _ in outages]
    assert 0.4 < seconds[0] < seconds[1] < seconds[2] and 1.2 < seconds[2] < 10
    assert outages[0][1] == "no answer in 0.5 s" and outages[-1] == (0.0, "")


def test_one_late_answer_among_others_is_no_outage(serve) -> None:
    async def main() -> tuple[list[Verdict], float]:
        async with VerifierPool(["judge"], settings=settings(server.url), timeout_seconds=1.0) as pool:
            slow = asyncio.create_task(pool.score([job("slow")]))
            await asyncio.sleep(0.3)  # so that the other is answered while this one waits
            return await pool.score([job("fast")]) + await slow, pool.outage()[0]

    server = serve(lambda path, body: reply("5"), stall=lambda body: "slow" in str(body))
    (fast, slow), down = asyncio.run(main())
    assert (fast.status, slow.status, down) == ("scored", "timeout", 0.0)


def test_it_comes_back(serve) -> None:
    async def main() -> list[Verdict]:
        async with VerifierPool(["judge"], settings=settings(server.url), timeout_seconds=1.0) as pool:
            first = await pool.score([job()])
            server.answer = lambda path, body: reply('{"score": 4}')
            return first + await pool.score([job()], timeout_seconds=10)

    server = serve(lambda path, body: (503, {"error": "loading"}))
    down, up = asyncio.run(main())
    assert down.status == "timeout" and "HTTP 503" in down.detail and up.reward == 0.4


def test_while_it_stays_down_it_is_asked_less_and_less(serve) -> None:
    """Also by jobs that come later: the pause is the endpoint's, not the job's."""

    async def main() -> tuple[list[Verdict], float, float]:
        async with VerifierPool(["judge"], settings=settings(server.url), timeout_seconds=1.2) as pool:
            assert pool.outage() == (0.0, "")
            verdicts = [await pool.score([job(str(n)), job(f"{n}b")]) for n in range(2)]
            (down, said), asked = pool.outage(), len(server.requests)
            assert "HTTP 503" in said and asked <= 10, "0.25 + 0.5 + 1 s of pauses leave room for 4 tries of 2"
            server.answer = lambda path, body: reply('{"score": 4}')
            verdicts.append(await pool.score([job()], timeout_seconds=10))
            return [v for some in verdicts for v in some], down, pool.outage()[0]

    server = serve(lambda path, body: (503, {"error": "loading"}))
    verdicts, down, after = asyncio.run(main())
    assert [v.status for v in verdicts] == ["timeout"] * 4 + ["scored"]
    assert 0.5 < down < 3.0 and after == 0.0


@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        ((401, {"error": "bad key"}), "HTTP 401"),
        ((404, {"error": "no such model"}), "HTTP 404"),
        ((200, {"choices": []}), "not an answer"),
        ((200, "text"), "not an answer"),
        (reply("I like it"), "no score"),
        (reply('{"score": 70}'), "no score from 0 to 10"),
        (reply(""), "no score"),
        (reply([{"type": "text", "text": "7"}]), "no text"),
        ((200, b"[" * 200_000), "no JSON"),
        ((200, b'{"choices": '), "no JSON"),
        ((200, b"\xff\xfe"), "no JSON"),
    ],
)
def test_an_answer_without_a_score_is_an_error(serve, answer: tuple[int, object], detail: str) -> None:
    server = serve(lambda path, body: answer)
    [verdict] = judge(settings(server.url), job())
    assert verdict.status == "error" and detail in verdict.detail and len(server.requests) <= 3


def test_the_rate_is_kept(serve) -> None:
    server = serve(lambda path, body: reply("5"))
    start = time.monotonic()
    judge(settings(server.url, judge_requests_per_second=20.0), *[job(str(i)) for i in range(11)])
    assert time.monotonic() - start >= 0.45


def test_concurrency_is_bounded(serve) -> None:
    server = serve(lambda path, body: reply("5"), seconds=0.05)
    judge(settings(server.url, judge_concurrency=3), *[job(str(i)) for i in range(20)])
    assert server.most_at_once <= 3


def test_no_judge_is_said_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"reward\.judge_url.*reward\.judge_model"):
        judge(VerifierSettings(judge_url=None), job())
    with pytest.raises(ConfigError, match=r"judge_url.*nonsense"):
        judge(settings("nonsense"), job())
    with pytest.raises(ConfigError, match=r"judge_url is 'http://localhost:80O0/v1': Invalid port"):
        judge(settings("http://localhost:80O0"), job())


def test_a_key_that_was_read_from_a_file_with_its_newline(serve) -> None:
    server = serve(lambda path, body: reply("5"))
    config = VerifierSettings(judge_url=server.url, judge_model="m", judge_api_key="k\n")
    assert judge(config, job())[0].reward == 0.5 and server.headers["authorization"] == "Bearer k"


def test_a_reference_that_utf8_cannot_write_is_asked_about_all_the_same(serve) -> None:
    server = serve(lambda path, body: reply("5"))
    [verdict] = judge(settings(server.url), job(truth="half a pair: \ud83d"))
    assert verdict.reward == 0.5 and "half a pair: ?" in server.requests[0][1]["messages"][0]["content"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"score": 7}', 7.0),
        ('"SCORE": "8"', 8.0),
        ("Score: 6.5", 6.5),
        ("7", 7.0),
        ("7/10", 7.0),
        ('<think>{"score": 1}</think>{"score": 9}', 9.0),
        ('{"score": 1} no, {"score": 2}', 2.0),
        ("seven", None),
        ("7 of 9", None),
    ],
)
def test_read_score(text: str, value: float | None) -> None:
    assert read_score(text) == value


def test_what_a_judge_repeats_without_end_is_read_at_once() -> None:
    """On the event loop, which nothing may block."""
    start = time.process_time()
    for text in ("5" + " \n" * 5000 + "x", "score" * 20_000, "score" + " " * 100_000, "5/" * 50_000, "5" * 100_000):
        assert read_score(text) in (None, float("inf"))
    assert time.process_time() - start < 1
