import asyncio

from olmorl.controller.signal import Changed


def test_a_waiter_looks_again_after_each_change() -> None:
    async def scenario() -> None:
        changed, found = Changed(), []
        waiter = asyncio.create_task(changed.until(lambda: list(found)))
        await asyncio.sleep(0)
        changed.notify()
        await asyncio.sleep(0)
        assert not waiter.done(), "there was nothing to find yet"
        found.append(1)
        changed.notify()
        assert await waiter == [1]

    asyncio.run(scenario())


def test_what_is_there_needs_no_wait_and_a_cancelled_waiter_harms_nobody() -> None:
    async def scenario() -> None:
        changed, found = Changed(), []
        given_up, patient = (asyncio.create_task(changed.until(lambda: list(found))) for _ in range(2))
        await asyncio.sleep(0)
        given_up.cancel()
        found.append(2)
        changed.notify()
        assert await patient == [2]
        assert await changed.until(lambda: found) == [2]
        assert given_up.cancelled()

    asyncio.run(scenario())
