"""A failure beside the main line ends the wait at once, with its first cause."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from olmorl.contract.errors import SyncError, WorkerError
from olmorl.controller.background import Background


async def for_ever() -> None:
    await asyncio.Event().wait()


async def fails(error: Exception) -> None:
    async with asyncio.TaskGroup() as tasks:  # as the loops do it
        tasks.create_task(for_ever())
        raise error


async def gives(value: int) -> int:
    await asyncio.sleep(0)
    return value


def run(scenario: Callable[[Background], Awaitable[None]]) -> None:
    async def main() -> None:
        background = Background()
        try:
            await asyncio.wait_for(scenario(background), 10)
        finally:
            await background.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}, "something still runs"

    asyncio.run(main())


def test_a_failed_loop_surfaces_with_its_first_cause() -> None:
    async def scenario(background: Background) -> None:
        background.start_loop("service", fails(WorkerError("inference-0 died")))
        with pytest.raises(WorkerError, match="inference-0 died"):
            await background.unless_failed(for_ever())

    run(scenario)


def test_a_loop_that_ends_by_itself_has_failed() -> None:
    async def scenario(background: Background) -> None:
        background.start_loop("rollouts", asyncio.sleep(0))
        with pytest.raises(WorkerError, match="the rollouts loop ended by itself"):
            await background.unless_failed(for_ever())

    run(scenario)


def test_a_failed_update_ends_the_wait_for_a_batch_that_would_never_come() -> None:
    async def scenario(background: Background) -> None:
        background.start_loop("service", for_ever())
        background.start_job(fails(SyncError("update to version 3 failed")))
        with pytest.raises(SyncError, match="version 3"):
            await background.unless_failed(for_ever())

    run(scenario)


def test_work_goes_on_when_a_job_ends_well() -> None:
    async def scenario(background: Background) -> None:
        background.start_job(asyncio.sleep(0))
        await asyncio.sleep(0.01)
        assert await background.unless_failed(gives(7)) == 7
        await background.finish_job()
        background.start_job(asyncio.sleep(0))
        await background.finish_job()
        await background.finish_job()

    run(scenario)


def test_the_works_own_error_comes_through() -> None:
    async def scenario(background: Background) -> None:
        background.start_loop("service", for_ever())
        with pytest.raises(ExceptionGroup):
            await background.unless_failed(fails(ValueError("mine")))

    run(scenario)


def test_a_stopped_loop_is_no_failure() -> None:
    async def scenario(background: Background) -> None:
        background.start_loop("rollouts", for_ever())
        await background.stop_loop("rollouts")
        await background.stop_loop("rollouts")
        assert not background.runs("rollouts")
        assert await background.unless_failed(gives(1)) == 1

    run(scenario)


def test_an_interrupt_cancels_the_work() -> None:
    async def scenario(background: Background) -> None:
        work = asyncio.create_task(for_ever())
        waiting = asyncio.create_task(background.unless_failed(work))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, work, return_exceptions=True)
        assert work.cancelled()

    run(scenario)


def test_at_the_end_a_job_may_finish_as_long_as_what_it_needs_goes_on() -> None:
    async def scenario(background: Background) -> None:
        goes_on = asyncio.Event()

        async def job() -> None:
            await goes_on.wait()

        background.start_loop("learners", for_ever())
        background.start_loop("engines", fails(WorkerError("too few")))
        background.start_job(job(), name="checkpoint")
        asyncio.get_running_loop().call_later(0.01, goes_on.set)
        await background.end_job("checkpoint", timeout=60, needs="learners")
        assert goes_on.is_set(), "it was not waited for"

    async def in_vain(background: Background) -> None:
        background.start_loop("learners", fails(WorkerError("gone")))
        background.start_job(for_ever(), name="checkpoint")
        await background.end_job("checkpoint", timeout=60, needs="learners")

    run(scenario)
    run(in_vain)
