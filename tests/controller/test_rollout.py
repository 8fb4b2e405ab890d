"""Generation as the driver sees it, against a real engine in this process: nothing is lost, nothing counted twice."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np

from olmorl.contract.generation import RolloutSample, SamplingParams
from olmorl.controller.rollout import RolloutService

PROMPT = np.array([1, 10, 13, 8, 13, 6, 14], np.int32)  # <bos>7+5+3=
PARAMS = SamplingParams(n=4, max_tokens=40, seed=3)


def serving(workers: list[Any], scenario: Callable[[RolloutService], Awaitable[None]]) -> RolloutService:
    """Run `scenario` beside the service's own loops. A lost worker is removed, as the supervisor would."""

    async def main() -> RolloutService:
        def lost(name: str, reason: str) -> None:
            LOSSES.append((name, reason))
            service.remove_worker(name)

        service = RolloutService(on_lost=lost)
        for worker in workers:
            service.ensure_worker(worker)
        try:
            async with asyncio.timeout(60):
                await scenario(service)
        finally:
            await service.close()
        return service

    LOSSES.clear()
    return asyncio.run(main())


LOSSES: list[tuple[str, str]] = []  # of the last scenario: (worker, reason)


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


def test_samples_have_the_lengths_that_are_asked_for(engine: Any) -> None:
    """Each its own, also when only some are asked for, as after the loss of a worker."""
    params = replace(PARAMS, ignore_eos=True)

    async def lengths(service: RolloutService, request_id: str, **options: Any) -> dict[int, int]:
        arrivals = service.generate(request_id, PROMPT, params, lengths=(3, 30, 1, 17), **options)
        return {s.sample_index: len(s.token_ids) async for samples in arrivals for s in samples}

    async def scenario(service: RolloutService) -> None:
        assert await lengths(service, "all") == {0: 3, 1: 30, 2: 1, 3: 17}
        assert await lengths(service, "some", sample_indices=(1, 3)) == {1: 30, 3: 17}

    serving([engine], scenario)


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


def test_what_a_lost_worker_had_not_finished_is_done_by_another(start_engine: Callable[[str], Any]) -> None:
    """Same seed, same sample index: the samples are those that a run without the loss would have had."""
    first, second = start_engine("a"), start_engine("b")

    async def undisturbed(service: RolloutService) -> None:
        expected.extend(await collect(service, "r"))

    async def scenario(service: RolloutService) -> None:
        first.worker.pause()
        request = asyncio.create_task(collect(service, "r"))
        while not first.worker.drain(0).queued:
            await asyncio.sleep(0.01)
        first.worker.shutdown()
        samples = await request
        assert {s.worker for s in samples} == {"b"}
        by_index = {s.sample_index: s.token_ids.tolist() for s in samples}
        assert by_index == {s.sample_index: s.token_ids.tolist() for s in expected}
        assert service.reissued_requests == 1
        assert service.tokens_received == num_tokens(samples)

    expected: list[RolloutSample] = []
    serving([second], undisturbed)
    serving([first, second], scenario)
    assert [name for name, _ in LOSSES] == ["a"] and "shut down" in LOSSES[0][1]


def test_requests_wait_while_there_is_no_worker(engine: Any) -> None:
    async def scenario(service: RolloutService) -> None:
        request = asyncio.create_task(collect(service, "r"))
        given_up = asyncio.create_task(collect(service, "nobody fetches this"))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        service.ensure_worker(engine)
        assert len(await request) == 4
        assert service.in_flight == []

    serving([], scenario)
