"""Hangs and lost work that other systems shipped, each as a test of ours, by the number of the survey.

A, weight sync
 1     answers of sync calls ignored, an update half open   test_sync_protocol.py: no_schedule_hangs...,
                                                            tests/inference/test_worker.py: a_sender_that_stops_halfway
 2     shard gathers amid the sends of another group        tests/learner/test_worker.py: two_ranks_train_as_one...
 3     one side waits for a version that the other skips    test_sync_protocol.py: versions_may_be_skipped
 4     the last evaluation never comes                      tests/end_to_end/test_train.py: metrics_go_by_their_names
 5     a receiver never enters                              here, and tests/learner/test_weight_sender.py
 6     aborts and an update amid a pause                    here
 7     no cap on restarts, no floor, restarted is healthy   test_supervisor.py, test_sync_protocol.py
C, queue
21     a producer fails, and the trainer waits for ever     test_loop.py: a_failure_of_the_producers..., and here
22     a batch that no group may fill                       test_buffer.py: no_schedule_breaks..., test_resume.py
23     the queue is drained, and what is over thrown away   here
24     most groups carry no signal                          test_loop.py: signal_may_be_rare
25     a request never leaves "running"; cancellation       test_rollout.py: old_lease..., requests_wait...
27     strictly on policy, and yet stale                    test_loop.py: a_synchronous_run_admits_nothing...
D, resume
28     the cursor runs ahead, long prompts are lost         test_resume.py: nothing_is_lost...; tests/faults
29     counters forgotten, a burst beyond the bound         here, test_resume.py
30     the order of the data starts again                   test_resume.py, tests/data/test_stream.py
"""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from olmorl.config.schema import Config
from olmorl.contract.errors import WorkerError
from olmorl.contract.generation import RolloutRequest, SamplingParams
from olmorl.controller.buffer import RolloutBuffer
from olmorl.controller.compose import Inputs
from olmorl.controller.group import Group, State
from olmorl.controller.resume import PromptQueue
from olmorl.controller.scoring import Scorer
from olmorl.controller.sync_protocol import SENDER, Deadlines, Evict, Join, Live, Reset, SyncProtocol, Transfer
from olmorl.data.stream import PromptStream


def admit(buffer: RolloutBuffer, queue: PromptQueue, *, version: int) -> list[Group]:
    """Fill the buffer with groups that are being rolled out."""
    groups = []
    while buffer.has_free_slot():
        groups.append(buffer.admit(next(queue), version=version, seed=0, now=0.0))
        buffer.claim()
    return groups


def queue_of(inputs: Inputs) -> PromptQueue:
    return PromptQueue(PromptStream(inputs.train, seed=0))


def test_5_a_receiver_that_never_enters_is_waited_for_so_long_and_no_longer() -> None:
    protocol = SyncProtocol(deadlines=Deadlines(form=10, reset=5))
    protocol.add("well", now=0)
    protocol.add("hung", now=0)
    assert protocol.offer(0, now=0) == [Join(1, (SENDER, "well", "hung"))]
    for member in (SENDER, "well"):
        assert protocol.joined(member, epoch=1, now=1) == []
    assert [(wait.member, wait.what) for wait in protocol.waiting()] == [("hung", "to join epoch 1")]
    assert protocol.tick(now=9) == []
    assert protocol.tick(now=10) == [Reset(member, 1) for member in (SENDER, "well", "hung")]
    for member in (SENDER, "well"):
        assert protocol.was_reset(member, epoch=1, now=11) == []
    evict, join = protocol.tick(now=15)
    assert isinstance(evict, Evict) and evict.engine == "hung"
    assert join == Join(2, (SENDER, "well"))
    for member in (SENDER, "well"):
        commands = protocol.joined(member, epoch=2, now=16)
    assert commands == [Transfer(2, 0, ("well",))]
    protocol.staged("well", epoch=2, now=17)
    protocol.sent(epoch=2, now=17)
    assert Live(0) in protocol.committed("well", version=0, now=18)


def test_6_aborts_and_new_requests_amid_a_pause_do_no_harm(engine: Any) -> None:
    """What was aborted comes out once, as far as it got; the others end well when the engine goes on."""
    worker = engine.worker
    params = SamplingParams(n=2, max_tokens=30, seed=1, ignore_eos=True)

    def request(name: str) -> RolloutRequest:
        prompt = np.array([1, 10, 13, 8, 13, 6, 14], np.int32)
        return RolloutRequest(request_id=name, lease=1, prompt_token_ids=prompt, params=params, sample_indices=(0, 1))

    worker.pause()
    worker.submit([request("a"), request("b")])
    worker.abort(["a", "unknown"])
    worker.abort(["a"])
    worker.submit([request("c")])
    worker.pause()
    worker.resume()
    assert worker.wait_idle(30)
    samples = worker.drain(1).samples
    ends = sorted((s.request_id, s.sample_index, s.finish_reason, len(s.token_ids)) for s in samples)
    assert ends == [("a", 0, "abort", 0), ("a", 1, "abort", 0)] + [(n, i, "length", 30) for n in "bc" for i in (0, 1)]


def test_21_a_verdict_that_can_no_more_come_is_an_error_and_not_a_wait(
    quickstart_config: Callable[..., Config], inputs: Inputs
) -> None:
    async def main() -> str:
        scorer = await Scorer.start(quickstart_config().reward, verifiers=inputs.verifiers)
        await scorer.close()
        prompt = PromptStream(inputs.train, seed=0).next()
        jobs = [_sample(prompt.prompt_id)]
        try:
            async with asyncio.timeout(10):
                await scorer.score(prompt, jobs)
        except WorkerError as error:
            return str(error)
        return "no error"

    assert asyncio.run(main()) == "the verifier pool is closed"


def _sample(request_id: str) -> Any:
    from olmorl.contract.generation import RolloutSample

    none = np.zeros(1, np.float32)
    return RolloutSample(
        request_id=request_id,
        lease=1,
        sample_index=0,
        worker="inference-0",
        token_ids=none.astype(np.int32),
        logprobs=none,
        raw_logprobs=none,
        version_spans=((0, 0, 1),),
        text="7",
        finish_reason="stop",
    )


def test_23_what_is_finished_beyond_a_batch_waits_for_the_next(inputs: Inputs) -> None:
    """Many more are finished than a batch takes: each is trained, in the order in which they were admitted."""
    buffer = RolloutBuffer(groups_per_batch=2, async_steps=7, window=14)
    groups = admit(buffer, queue_of(inputs), version=0)
    for group in reversed(groups):
        buffer.finish(group)
    taken = [buffer.take_batch(version) for version in range(8)]
    assert [group for batch in taken if batch for group in batch] == groups
    assert buffer.take_batch(8) is None


def test_29_after_a_resume_no_burst_goes_beyond_the_slots(inputs: Inputs) -> None:
    """Groups that an earlier attempt finished hold their slots, and keep the age that they had."""
    queue = queue_of(inputs)
    before = RolloutBuffer(groups_per_batch=2, async_steps=2, window=4)
    groups = admit(before, queue, version=3)
    for group in groups[:4]:
        before.finish(group)

    buffer = RolloutBuffer(groups_per_batch=2, async_steps=2, window=4)
    buffer.restore(groups[:4], version=5)
    fresh = admit(buffer, queue, version=5)
    assert len(fresh) == 2 and len(buffer) == 6
    assert buffer.take_batch(5) == groups[:2]
    assert {group.admitted_version for group in groups[:2]} == {3}
    assert buffer.groups[2].state is State.FINISHED
