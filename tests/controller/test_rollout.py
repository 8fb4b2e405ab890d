"""Generation as the driver sees it, against a real engine in this process: nothing is lost, nothing counted twice."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from olmorl.contract.errors import WorkerError
from olmorl.contract.generation import RolloutSample, SamplingParams
from olmorl.controller.rollout import RolloutService

PROMPT = np.array([1, 10, 13, 8, 13, 6, 14], np.int32)  # <bos>7+5+3=
PARAMS = SamplingParams(n=4, max_tokens=40, seed=3)


def serving(workers: list[Any], scenario: Callable[[RolloutService], Awaitable[None]]) -> RolloutService:
    """Run `scenario` beside the service's own loops; what these raise ends it."""

    async def main() -> RolloutService:
        service = RolloutService(workers)
        loops = asyncio.create_task(service.run())
        work = asyncio.ensure_future(scenario(service))
        await asyncio.wait([loops, work], return_when=asyncio.FIRST_COMPLETED, timeout=60)
        work.cancel()
        if not loops.done():
            loops.cancel()
        await asyncio.gather(loops, return_exceptions=True)
        if not loops.cancelled() and (error := loops.exception()) is not None:
            raise error
        await work
        return service

    return asyncio.run(main())


async def collect(service: RolloutService, request_id: str, **options: int) -> list[RolloutSample]:
    arrived: list[RolloutSample] = []
    async for samples in service.generate(request_id, PROMPT, PARAMS, **options):
        arrived += samples
    return arrived


def num_tokens(samples: list[RolloutSample]) -> int:
    return sum(len(s.token_ids) for s in samples)


def test_every_sample_arrives_once_and_every_token_is_counted(engine: Any) -> None:
    async def scenario(service: RolloutService) -> None:
        groups = await asyncio.gather(*(collect(service, f"r{i}") for i in range(6)))
        for i, samples in enumerate(groups):
            assert sorted(s.sample_index for s in samples) == [0, 1, 2, 3]
            assert {s.request_id for s in samples} == {f"r{i}"}
        assert service.tokens_received == sum(map(num_tokens, groups)) > 0
        assert service.undelivered_tokens == 0 and service.in_flight == []

    service = serving([engine], scenario)
    assert service.stats["inference-0"]["output_tokens"] == service.tokens_received
    assert service.late_samples == 0


def test_two_workers_share_the_work(start_engine: Callable[[str], Any]) -> None:
    async def scenario(service: RolloutService) -> None:
        groups = await asyncio.gather(*(collect(service, f"r{i}") for i in range(4)))
        assert [{s.worker for s in samples} for samples in groups] == [{"a"}, {"b"}, {"a"}, {"b"}]

    serving([start_engine("a"), start_engine("b")], scenario)


def test_tokens_that_nobody_fetched_are_undelivered(engine: Any) -> None:
    """received = delivered + undelivered, whenever one looks, and also when a request was given up half-way."""

    async def scenario(service: RolloutService) -> None:
        delivered = 0
        async with aclosing(service.generate("r", PROMPT, PARAMS)) as arrivals:
            async for samples in arrivals:
                delivered += num_tokens(samples)
                await service.idle()  # the others lie in the inbox
                assert service.tokens_received == delivered + service.undelivered_tokens
                break
        assert service.tokens_received == delivered + service.undelivered_tokens
        assert service.undelivered_tokens > 0

    serving([engine], scenario)


def test_what_arrives_under_an_old_lease_is_dropped_and_counted(engine: Any) -> None:
    async def scenario(service: RolloutService) -> None:
        engine.worker.pause()  # nothing may finish before it is given up
        given_up = service.generate("r", PROMPT, PARAMS)
        fetching = asyncio.create_task(anext(given_up))
        while not engine.worker.drain(0).queued:
            await asyncio.sleep(0.01)
        assert service.in_flight == ["r"]
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)
        assert service.in_flight == []
        await service.abort(["r"])
        engine.worker.resume()
        again = await collect(service, "r")
        assert sorted(s.sample_index for s in again) == [0, 1, 2, 3]
        assert {s.finish_reason for s in again} <= {"stop", "length"}
        assert service.tokens_received == num_tokens(again)

    assert serving([engine], scenario).late_samples == PARAMS.n


def test_the_gate_holds_training_and_lets_evaluation_pass(engine: Any) -> None:
    async def scenario(service: RolloutService) -> None:
        service.hold()
        held = asyncio.create_task(collect(service, "train"))
        evaluated = await collect(service, "eval", priority=-1)
        assert len(evaluated) == 4
        await service.idle()
        assert not held.done() and service.in_flight == []
        service.release()
        assert len(await held) == 4

    serving([engine], scenario)


def test_idle_sees_requests_that_have_not_reached_a_worker(engine: Any) -> None:
    """An engine that is asked would say it is idle; a drain must not believe it."""

    async def scenario(service: RolloutService) -> None:
        request = asyncio.create_task(collect(service, "r"))
        await asyncio.sleep(0)
        service.hold()
        assert engine.worker.wait_idle(0)
        idle = asyncio.create_task(service.idle())
        await asyncio.sleep(0)
        assert not idle.done()
        await idle
        assert service.in_flight == []
        assert len(await request) == 4

    serving([engine], scenario)


def test_a_lost_worker_ends_the_loops(engine: Any) -> None:
    async def scenario(service: RolloutService) -> None:
        engine.worker.shutdown()
        await collect(service, "r")

    with pytest.raises(ExceptionGroup) as raised:
        serving([engine], scenario)
    assert raised.group_contains(WorkerError, match="shut down")
