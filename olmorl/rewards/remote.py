"""Verifiers that only wait for another machine: judges and code servers. They run on the event loop, many at once.

A verdict that is not there at its deadline is a timeout, with what the endpoint said last.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Protocol

from olmorl.rewards.settings import VerifierSettings
from olmorl.rewards.verdict import Verdict, VerifierJob
from olmorl.rewards.verifier import JUDGES, canonical_name

if TYPE_CHECKING:
    from olmorl.rewards.endpoint import Endpoint
    from olmorl.rewards.judge import Bench

PROGRAMS = ("code", "code_stdio")


class RemoteVerifier(Protocol):
    @property
    def endpoint(self) -> "Endpoint": ...
    def __call__(self, completion: str, ground_truth: object, prompt: str | None = None) -> Awaitable[Verdict]: ...


def is_remote(name: str, settings: VerifierSettings) -> bool:
    """Raises ConfigError for an unknown name."""
    canonical = canonical_name(name)
    return canonical in JUDGES or (canonical in PROGRAMS and settings.code_api_url is not None)


class RemoteVerifiers:
    """Those of one pool, with the endpoints they share."""

    def __init__(self, names: Sequence[str], settings: VerifierSettings) -> None:
        """Raises ConfigError when what they ask is not configured."""
        self._settings = settings
        self._open: list[Bench | Endpoint] = []
        kinds = {name: canonical_name(name) for name in names}
        self._verifiers: dict[str, RemoteVerifier] = {}
        if any(kind in JUDGES for kind in kinds.values()):
            self._add_judges({name: JUDGES[kind] for name, kind in kinds.items() if kind in JUDGES})
        if programs := {name: kind for name, kind in kinds.items() if kind in PROGRAMS}:
            self._add_programs(programs)

    def _add_judges(self, kinds: dict[str, str]) -> None:
        from olmorl.rewards.judge import Bench, Judge  # with httpx: a cost that only who asks a judge pays

        bench = Bench(self._settings)
        self._open.append(bench)
        self._verifiers |= {name: Judge(bench, kind) for name, kind in kinds.items()}

    def _add_programs(self, kinds: dict[str, str]) -> None:
        from olmorl.rewards.endpoint import Endpoint
        from olmorl.rewards.remote_program import CONCURRENCY, RemoteProgram

        assert self._settings.code_api_url is not None, "is_remote asked for it"
        url = self._settings.code_api_url.rstrip("/")
        for path in ("/test_program_stdio", "/test_program"):  # open-instruct's flag holds the path too
            url = url.removesuffix(path)
        endpoint = Endpoint(url, key="reward.code_api_url", concurrency=CONCURRENCY)
        self._open.append(endpoint)
        for name, kind in kinds.items():
            self._verifiers[name] = RemoteProgram(endpoint, self._settings, stdio=kind == "code_stdio")

    async def judge(self, job: VerifierJob, timeout: float) -> Verdict:
        verifier = self._verifiers[job.verifier]
        try:
            async with asyncio.timeout(timeout):
                return await verifier(job.completion, job.ground_truth, job.prompt)
        except TimeoutError:
            endpoint = verifier.endpoint
            why = f"; {endpoint.trouble}" if endpoint.trouble else ""
            endpoint.overdue(timeout)
            return Verdict(status="timeout", detail=f"not judged within {timeout:g} s{why}")

    def outage(self) -> tuple[float, str]:
        endpoints = (verifier.endpoint for verifier in self._verifiers.values())
        return max(((endpoint.seconds_down, endpoint.trouble) for endpoint in endpoints), default=(0.0, ""))

    async def close(self) -> None:
        for each in self._open:
            await each.close()
