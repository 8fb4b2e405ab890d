"""How long the driver waits for an answer, and who is lost when none comes: the deadline counts while the driver itself
is there to look."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest
from ray.exceptions import ObjectLostError, RayError, RuntimeEnvSetupError

from olmorl.contract.errors import WorkerLostError
from olmorl.controller.cluster import LATE_SECONDS, Remote, answer_within


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


@pytest.mark.parametrize("error", [ObjectLostError("1f", None, ""), RuntimeEnvSetupError("no room on the disk")])
def test_whatever_ray_says_of_a_worker_it_is_the_worker_that_is_lost(error: RayError) -> None:
    """Not the run: an answer on its way goes down with its node, a node that joins may have no room for our source."""

    class Actor:
        """Where `Remote` meets Ray."""

        def remote(self, *args: object) -> "Actor":
            return self

        def future(self) -> "Future[None]":
            answer: Future[None] = Future()
            answer.set_exception(error)
            return answer

        call = node = property(lambda self: self)

    async def main() -> None:
        engine = Remote("inference-0", Actor())
        with pytest.raises(WorkerLostError, match="inference-0 died during drain"):
            await engine.call("drain", 1.0, timeout=5)
        with pytest.raises(WorkerLostError, match="inference-0 could not be placed"):
            await engine.placed()

    asyncio.run(main())
