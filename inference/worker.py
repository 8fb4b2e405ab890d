"""One inference worker: an engine on its thread behind plain blocking methods. The driver makes it a Ray actor.

Every method may be called from any thread. Errors are those of `olmorl.contract.errors`, data are numpy arrays and
dataclasses: whoever unpickles them needs no torch.
"""

import os
import socket
import threading
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from inference.device_peak import device_peak
from inference.engine import KvPolicy
from inference.engine_thread import EngineThread
from inference.recorded_engine import open_engine
from inference.request import Sequence
from inference.stopping import output_text
from inference.weight_receiver import ReceivedUpdate, WeightReceiver
from olmorl.contract.errors import ConfigError, OlmoRLError, WeightUpdateError, WorkerError
from olmorl.contract.generation import DrainReply, EngineConfig, RolloutRequest, RolloutSample, WorkerInfo
from olmorl.contract.training import ScoreRequest
from olmorl.contract.weights import CommitReport, SyncGroup, combine_checksums

Result = TypeVar("Result")
REWRITE = "rewrite"  # the pause of an engine whose weights are being received in place


class InferenceWorker:
    def __init__(self, config: EngineConfig, *, name: str, initial_version: int = -1) -> None:
        self.name = name
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self._engine = _translated(lambda: open_engine(config, name=name, initial_version=initial_version))
        decoder = self._engine.decoder
        self._receiver = WeightReceiver(
            decoder.specs, device=decoder.device, weights=decoder.tensors, hold=decoder.hold
        )
        self._updating = threading.Lock()  # what is being committed is not received into
        self._finished: list[Sequence] = []
        self._arrived = threading.Condition()
        self._stall_reported = 0.0
        self._thread = EngineThread(self._engine, on_finished=self._collect)

    def info(self) -> WorkerInfo:
        decoder = self._engine.decoder
        peak = device_peak(decoder.device)
        return WorkerInfo(
            name=self.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            device=str(decoder.device),
            num_parameters=decoder.num_parameters,
            peak_flops=peak.flops,
            peak_bandwidth=peak.bandwidth,
            peak_source=peak.source,
            tensors=decoder.specs,
            devices=decoder.ranks.size,
            max_prompt_tokens=self._engine.max_prompt_tokens,
        )

    def stats(self) -> dict[str, float]:
        """The engine's counters since it started."""
        return self._engine.stats()

    # Samples

    def submit(self, requests: list[RolloutRequest]) -> None:
        """Take all of them or, with ConfigError, none."""
        prompts = [request.prompt_token_ids.tolist() for request in requests]

        def add() -> None:
            seen = set(self._engine.requests)
            for request, prompt in zip(requests, prompts, strict=True):
                if request.request_id in seen:
                    raise ValueError(f"request {request.request_id!r} is already running")
                if not request.sample_indices:
                    raise ValueError(f"request {request.request_id!r} asks for no sample")
                self._engine.check(prompt, request.params)
                seen.add(request.request_id)
            for request, prompt in zip(requests, prompts, strict=True):
                self._engine.add(
                    request.request_id,
                    prompt,
                    request.params,
                    sample_indices=request.sample_indices,
                    lengths=request.lengths,
                    priority=request.priority,
                    tag=request.lease,
                )

        self._call(add)

    def drain(self, timeout_seconds: float) -> DrainReply:
        """All samples that finished since the last call; waits for the first of them, but not longer than told."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._finished or self._thread.failure, timeout_seconds)
            finished, self._finished = self._finished, []
        if self._thread.failure is not None and not finished:
            raise self._thread.failure
        stats = {**self._engine.stats(), "stall_seconds": self._thread.stalled_seconds()}
        samples = _translated(lambda: tuple(self._sample(sequence) for sequence in finished))
        return DrainReply(samples=samples, stats=stats, queued=int(stats["running"] + stats["waiting"]))

    def abort(self, request_ids: list[str]) -> None:
        """What these requests have so far comes out of `drain`, marked "abort"; unknown ids are ignored."""
        aborted = self._call(lambda: [s for request_id in request_ids for s in self._engine.abort(request_id)])
        self._collect(aborted)

    def pause(self) -> None:
        """No step is made once this returned; requests and their KV stay."""
        _translated(self._thread.pause)

    def resume(self) -> None:
        _translated(self._thread.resume)

    def wait_idle(self, timeout_seconds: float) -> bool:
        """True once every held request is finished."""
        return self._thread.wait_idle(timeout_seconds)

    def score(self, request: ScoreRequest) -> list[np.ndarray]:
        """Raw logprobs [L - 1] of given sequences under the weights served now."""
        return self._call(lambda: self._engine.score(request.sequences))

    # Weights

    def plan_updates(self, bucket_bytes: int, staging: str = "device") -> None:
        _translated(lambda: self._receiver.plan(bucket_bytes, staging))

    def join_sync_group(self, group: SyncGroup) -> None:
        _translated(lambda: self._receiver.join(group))

    def receive_weights(self, version: int) -> None:
        """Blocks until the update is staged, while the engine decodes. SyncError past the group's deadline.

        With staging "none" the engine stands still from here to the commit of a whole update.
        """
        with self._updating:
            if self._receiver.writes_in_place:
                self._call(self._begin_rewrite)
            _translated(lambda: self._receiver.receive(version))

    def commit_weights(self, version: int, checksums: dict[str, int], kv: KvPolicy = "keep") -> CommitReport:
        """Serve what was received, from the next step on. WeightUpdateError: it is not what was sent, and not served.

        Except with staging "none", the old weights then keep serving.
        """
        decoder = self._engine.decoder
        with self._updating:
            received = self._receiver.take(version, checksums)
            _translated(lambda: self._engine.share(received.update))
            stall_seconds = self._call(lambda: self._commit(received, kv))
            # Beside the next steps: they only read.
            wrong = received.update.differs_from(decoder)
        if wrong:
            raise WeightUpdateError(
                f"{len(wrong)} of {len(decoder.tensors)} tensors are not what was received, first {wrong[0]!r}: "
                "this engine must not serve"
            )
        specs = decoder.specs
        return CommitReport(
            worker=self.name,
            version=version,
            checksum=combine_checksums(received.update.checksums, specs),
            stall_seconds=stall_seconds,
            receive_seconds=received.seconds,
        )

    def discard_weights(self, version: int) -> None:
        """The engine serves `version` already. What was received, in place or not, is the same once more."""
        if self._receiver.discard(version) and self._engine.rewriting:
            self._call(self._end_rewrite)

    def reset_sync(self, epoch: int) -> None:
        """Leave the group of `epoch`, interrupting a receive, and drop what is half open."""
        self._receiver.reset(epoch)

    def ping(self) -> None:
        """Answers while the process lives and its engine has not failed."""
        if self._thread.failure is not None:
            raise self._thread.failure
        if self._engine.followers is not None:
            self._engine.followers.check()

    def weights_checksum(self) -> str:
        """Over the weights in place, not over what was received."""
        return self._call(self._engine.weights_checksum)

    def shutdown(self) -> None:
        self._thread.close()
        self._receiver.leave()
        if self._engine.followers is not None:
            self._engine.followers.close()

    def _commit(self, received: ReceivedUpdate, kv: KvPolicy) -> float:
        self._thread.add_stall(self._engine.commit(received.update, received.version, kv=kv))
        stalled = self._thread.stalled_seconds()
        stall_seconds, self._stall_reported = stalled - self._stall_reported, stalled
        self._thread.end_pause(REWRITE)
        return stall_seconds

    def _begin_rewrite(self) -> None:
        self._engine.rewriting = True
        self._thread.begin_pause(REWRITE)

    def _end_rewrite(self) -> None:
        self._engine.rewriting = False
        self._thread.end_pause(REWRITE)

    def _collect(self, finished: list[Sequence]) -> None:
        with self._arrived:
            self._finished.extend(finished)
            self._arrived.notify_all()

    def _sample(self, sequence: Sequence) -> RolloutSample:
        has_text = self._engine.tokenizer.exists
        return RolloutSample(
            request_id=sequence.request.request_id,
            lease=sequence.request.tag,
            sample_index=sequence.sample_index,
            worker=self.name,
            token_ids=np.array(sequence.output_ids, np.int32),
            logprobs=np.array(sequence.logprobs, np.float32),
            raw_logprobs=np.array(sequence.raw_logprobs, np.float32),
            version_spans=sequence.version_spans,
            text=output_text(sequence, self._engine.tokenizer) if has_text else "",
            finish_reason=sequence.finish_reason or "abort",
            kv_events=tuple(sequence.kv_events),
            error=sequence.error,
            t_first_token=sequence.t_first_token,
            t_finished=sequence.t_finished,
        )

    def _call(self, command: Callable[[], Result]) -> Result:
        return _translated(lambda: self._thread.call(command))


def _translated(work: Callable[[], Result]) -> Result:
    """Only errors of the contract leave a worker."""
    try:
        return work()
    except OlmoRLError:
        raise
    except (ValueError, KeyError) as error:
        raise ConfigError(str(error)) from None
    except Exception as error:
        raise WorkerError(f"{type(error).__name__}: {error}") from None
