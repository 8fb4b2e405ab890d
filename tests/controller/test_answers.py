"""How long the driver waits for an answer: the deadline counts while the driver itself is there to look."""

import asyncio
import time
from collections.abc import Callable

import pytest

from olmorl.controller.cluster import LATE_SECONDS, answer_within


def wait(seconds: float, prepare: "Callable[[asyncio.Future[int]], None]") -> "tuple[int, asyncio.Future[int]]":
    async def main() -> "tuple[int, asyncio.Future[int]]":
        answer = asyncio.get_running_loop().create_future()
        prepare(answer)
        return await answer_within(seconds, answer), answer

    return asyncio.run(main())


def test_an_answer_in_time() -> None:
    value, _ = wait(5, lambda answer: answer.set_result(3))
    assert value == 3


def test_none_in_time_and_the_question_is_withdrawn() -> None:
    asked = []
    with pytest.raises(TimeoutError):
        wait(0.05, asked.append)
    assert asked[0].cancelled()


def test_a_driver_that_stood_still_looks_again_before_it_blames_a_worker() -> None:
    """The answer came while it slept; when it wakes, the deadline has passed too."""

    def sleep_over_it(answer: "asyncio.Future[int]") -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(0.3, answer.set_result, 3)
        loop.call_later(0.1, time.sleep, LATE_SECONDS + 0.3)

    value, _ = wait(0.2, sleep_over_it)
    assert value == 3


def test_and_then_waits_no_longer_than_it_should_have() -> None:
    def sleep(_: "asyncio.Future[int]") -> None:
        asyncio.get_running_loop().call_later(0.1, time.sleep, LATE_SECONDS + 0.3)

    started = time.monotonic()
    with pytest.raises(TimeoutError):
        wait(0.2, sleep)
    assert time.monotonic() - started < LATE_SECONDS + 5
