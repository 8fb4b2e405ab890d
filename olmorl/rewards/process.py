"""The verifier process: reads batches of jobs, answers each job as soon as it is judged.

Started as `python -P -m olmorl.rewards.process CHANNEL LIFELINE` (file descriptors); imports next to nothing but the
verifiers asked for. One answer a job, at once: whoever watches knows at any moment which job is running, and so whom
to blame for a hang or a crash.

Frames on the channel are a length and a payload. The first names the verifiers, with their settings. Jobs are
pickled; answers are JSON, so that nothing a verifier does can make the parent run code. The lifeline is a pipe whose
write end the parent alone holds: when it closes, the kernel sends SIGIO, deadly by default, to the whole process
group, also while Python is stuck in C code.
"""

import fcntl
import json
import os
import pickle
import select
import signal
import struct
import sys
import traceback
from typing import BinaryIO

from olmorl.contract.errors import ConfigError
from olmorl.rewards.settings import VerifierSettings
from olmorl.rewards.verdict import Episode, VerifierJob
from olmorl.rewards.verifier import Verifier, counts_tokens, find_verifier, load_verifier, run_verifier

HEADER = struct.Struct("<I")
MAX_DETAIL, MAX_TRACEBACK = 500, 5000  # characters


def main(channel: int, lifeline: int) -> None:
    os.set_inheritable(channel, False)
    os.set_inheritable(lifeline, False)
    die_with_parent(lifeline)
    jobs = os.fdopen(channel, "rb", closefd=False)
    owner = os.getpid()

    def answer(message: object) -> None:
        if os.getpid() != owner:  # a fork that came back from its verifier: one job has one answer
            os._exit(0)
        _write_frame(channel, message)

    try:
        verifiers = load_verifiers(*pickle.loads(_read_frame(jobs)))
    except ConfigError as error:
        answer({"error": str(error)})
        return
    answer({"ready": True})
    counting = {name for name, verifier in verifiers.items() if counts_tokens(verifier)}
    while payload := _read_frame(jobs):
        for name, completion, ground_truth, prompt, num_tokens, episode in pickle.loads(payload):
            job = VerifierJob(
                verifier=name,
                completion=completion,
                ground_truth=ground_truth,
                prompt=prompt,
                num_tokens=num_tokens if name in counting else None,
                episode=None if episode is None else Episode(*episode),
            )
            verdict = run_verifier(verifiers[name], job)
            detail, told = verdict.detail[:MAX_DETAIL], verdict.traceback[-MAX_TRACEBACK:]
            answer((verdict.status, verdict.reward, detail, verdict.observation, told))


def die_with_parent(lifeline: int) -> None:
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGIO})
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it closed before the signal was armed
        sys.exit(1)


def load_verifiers(names: list[str], settings: VerifierSettings) -> dict[str, Verifier]:
    verifiers = {}
    for name in names:
        path = find_verifier(name)
        try:
            verifiers[name] = load_verifier(path, settings)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # whatever a module of the user's does when it is imported
            at = traceback.extract_tb(error.__traceback__)[-1]
            place = "" if isinstance(error, SyntaxError) else f" ({at.filename}:{at.lineno})"  # says its own
            raise ConfigError(f"verifier {name!r} cannot be loaded: {type(error).__name__}: {error}{place}") from None
    return verifiers


def _read_frame(stream: BinaryIO) -> bytes:
    """Empty at the end of the stream."""
    header = stream.read(HEADER.size)
    return stream.read(HEADER.unpack(header)[0]) if len(header) == HEADER.size else b""


def _write_frame(channel: int, message: object) -> None:
    payload = json.dumps(message).encode()
    left = memoryview(HEADER.pack(len(payload)) + payload)
    while left:
        left = left[os.write(channel, left) :]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
