"""The parent's side of one verifier process: start, feed, time, kill."""

import asyncio
import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

from olmorl.contract.errors import ConfigError, WorkerError
from olmorl.rewards.process import HEADER
from olmorl.rewards.settings import VerifierSettings
from olmorl.rewards.verdict import Verdict, VerifierJob

START_TIMEOUT_SECONDS = 120.0  # a verifier of the user's may import a lot
CHUNK_BYTES = 1 << 16


class VerifierProcess:
    """A process that has its verifiers loaded. It leads a session of its own: Ctrl-C does not reach it, and whatever
    it starts is killed with it."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        lifeline: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._lifeline: int | None = lifeline
        self._reader = reader
        self._writer = writer
        self._received = bytearray()

    @classmethod
    async def start(cls, verifiers: Sequence[str], settings: VerifierSettings) -> "VerifierProcess":
        """Raises ConfigError when a verifier cannot be loaded, WorkerError when the process does not come up."""
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        watched, lifeline = os.pipe()
        descriptors = (theirs.fileno(), watched)
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "olmorl.rewards.process", *map(str, descriptors)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a verifier prints is no result of the command that runs
                env={**os.environ, "PYTHONPATH": _search_path()},
                pass_fds=descriptors,
                start_new_session=True,
            )
        except OSError as error:
            writer.close()
            os.close(lifeline)
            raise WorkerError(f"cannot start a verifier process: {error}") from None
        finally:
            theirs.close()
            os.close(watched)
        self = cls(process, lifeline, reader, writer)
        try:
            await self._greet(verifiers, settings)
        except BaseException:
            await self.kill()
            raise
        return self

    async def _greet(self, verifiers: Sequence[str], settings: VerifierSettings) -> None:
        names = ", ".join(verifiers)
        replies: list = []
        try:
            async with asyncio.timeout(START_TIMEOUT_SECONDS):
                await self._send((list(verifiers), settings))
                while not replies:
                    replies = await self._receive()
        except TimeoutError:
            raise WorkerError(f"a verifier process did not load {names} in {START_TIMEOUT_SECONDS:.0f} s") from None
        except EOFError:
            await self.kill()
            raise WorkerError(f"a verifier process {self._describe_end()} while it loaded {names}") from None
        if "error" in replies[0]:
            raise ConfigError(replies[0]["error"])

    @property
    def pid(self) -> int:
        return self._process.pid

    async def judge(
        self, jobs: Sequence[VerifierJob], *, timeout: float, answer: Callable[[Verdict], None]
    ) -> Verdict | None:
        """Call `answer` for one job after the other, in order, as each is judged within `timeout` seconds.

        Returns None when all are. Else the process is gone, and what is returned is the verdict on the first job that
        was not answered, for that one was running.
        """
        left = len(jobs)
        try:
            async with asyncio.timeout(timeout):
                await self._send([_pack(job) for job in jobs])
            while left:
                async with asyncio.timeout(timeout):
                    replies = await self._receive()
                left -= len(replies)
                _deliver(replies, answer)
        except TimeoutError:
            late = await self.kill()
            _deliver(late, answer)
            if not late:
                return Verdict(status="timeout", detail=f"not judged within {timeout:g} s")
            # It was this event loop that was late: the job now running has had no time at all.
            return Verdict(status="error", detail="killed together with another job")
        except EOFError:
            await self.kill()
            return Verdict(status="error", detail=f"the verifier process {self._describe_end()}")
        return None

    async def _send(self, message: object) -> None:
        payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._writer.write(HEADER.pack(len(payload)))
        self._writer.write(payload)
        with contextlib.suppress(ConnectionError):  # the reader sees its end, after the last answers
            await self._writer.drain()

    async def _receive(self) -> list:
        """The messages that have come in whole. Raises EOFError at the end."""
        try:
            chunk = await self._reader.read(CHUNK_BYTES)
        except ConnectionError:
            chunk = b""
        if not chunk:
            raise EOFError
        self._received += chunk
        messages, start = [], 0
        while len(self._received) >= start + HEADER.size:
            begin = start + HEADER.size
            end = begin + HEADER.unpack_from(self._received, start)[0]
            if end > len(self._received):
                break
            messages.append(json.loads(self._received[begin:end]))
            start = end
        del self._received[:start]
        return messages

    async def kill(self) -> list:
        """End the process and all of its group. Returns the messages that were still under way."""
        messages: list = []
        if self._lifeline is None:
            return messages
        os.close(self._lifeline)
        self._lifeline = None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            with contextlib.suppress(EOFError, TimeoutError):
                async with asyncio.timeout(1.0):  # something that left the group may hold the channel open
                    while True:
                        messages += await self._receive()
        finally:
            self._writer.close()
            self._process.wait()  # at once: a process gives up its memory before it closes its channel
        return messages

    def _describe_end(self) -> str:
        code = self._process.returncode
        return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _deliver(replies: Sequence[tuple], answer: Callable[[Verdict], None]) -> None:
    for status, reward, detail, observation, traceback in replies:
        verdict = Verdict(status=status, reward=reward, detail=detail, observation=observation, traceback=traceback)
        answer(verdict)


def _pack(job: VerifierJob) -> tuple:
    """Plain values: a class's own pickle would cost more than most verdicts."""
    episode = None if job.episode is None else tuple(job.episode)
    return job.verifier, job.completion, job.ground_truth, job.prompt, job.num_tokens, episode


def _search_path() -> str:
    """This process's modules, then those of the current directory, which can so shadow nothing."""
    return os.pathsep.join(dict.fromkeys([*(path for path in sys.path if path), os.getcwd()]))
