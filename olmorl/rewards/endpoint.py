"""An HTTP endpoint that verdicts depend on: asked at a bounded rate, again after a failure, with growing pauses.

It never gives up by itself: who asks has a deadline. So an endpoint that is down makes verdicts late, never wrong.
"""

import asyncio
import json
import logging
import random
import time

import httpx

from olmorl.contract.errors import ConfigError

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.25, 30.0
AGAIN = {408, 409, 425, 429, 500, 502, 503, 504}


class Refused(Exception):
    """The endpoint answers, and asking again would change nothing."""


class Endpoint:
    """POSTs JSON to paths below `url`. Belongs to one event loop."""

    def __init__(
        self,
        url: str,
        *,
        key: str,
        api_key: str | None = None,
        concurrency: int,
        requests_per_second: float | None = None,
    ) -> None:
        """`key` is what in the config holds the url. Raises ConfigError."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{key} is {url!r}; it must begin with http:// or https://")
        headers = {"Content-Type": "application/json"}
        if api_key:
            # A secret that was mounted as a file ends in a newline.
            headers["Authorization"] = f"Bearer {api_key.strip()}"
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        try:
            self._client = httpx.AsyncClient(
                base_url=url.rstrip("/") + "/", headers=headers, timeout=None, limits=limits
            )  # no timeouts: the verdict's deadline cancels
        except httpx.InvalidURL as error:
            raise ConfigError(f"{key} is {url!r}: {error}") from None
        self._free = asyncio.Semaphore(concurrency)
        self._interval = 1.0 / requests_per_second if requests_per_second else 0.0
        self._next_start = 0.0
        self._resume_at = 0.0
        self._pause = 0.0
        self._down_since = self._last_failure = self._asked_at = self._answered_at = 0.0
        self.trouble = ""
        """the last failure, "" after a success: what a late verdict is told to be late for"""

    async def post(self, path: str, body: dict) -> object:
        """The JSON of the answer. Raises Refused; else waits for as long as it takes."""
        content = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        while True:
            async with self._free:
                await self._turn()
                started = self._asked_at = time.monotonic()
                try:
                    reply = await self._client.post(path.lstrip("/"), content=content)
                except httpx.HTTPError as error:
                    failure, wait = f"{type(error).__name__}: {error}", 0.0
                else:
                    self._answered_at = time.monotonic()
                    if reply.status_code not in AGAIN:
                        self.trouble, self._pause = "", 0.0
                        if reply.is_success:
                            return _read_json(reply)
                        raise Refused(f"HTTP {reply.status_code}: {reply.text[:200]}")
                    failure, wait = f"HTTP {reply.status_code}: {reply.text[:200]}", _retry_after(reply)
            self._failed(failure, wait, started=started)

    def overdue(self, seconds: float) -> None:
        """Somebody waited so long in vain. Where nobody was answered meanwhile, the endpoint is down: it is silent."""
        now = time.monotonic()
        if max(self._answered_at, self._last_failure) < min(self._asked_at, now - seconds):
            self._failed(f"no answer in {seconds:g} s", 0.0, started=now - seconds)

    def _failed(self, failure: str, wait: float, *, started: float) -> None:
        """All requests pause, longer after each try that fails; those that were out at the same time are one try."""
        now = time.monotonic()
        if not self.trouble:
            log.warning("%s does not answer, asking again: %s", self._client.base_url, failure)
            self._down_since = started
        self.trouble, self._last_failure = failure, now
        if started >= self._resume_at:
            self._pause = min(max(2 * self._pause, FIRST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)
        self._resume_at = max(self._resume_at, now + max(self._pause, wait) * random.uniform(0.75, 1.0))

    @property
    def seconds_down(self) -> float:
        """From the first to the last of the failures since an answer: while nobody asks, nothing is known."""
        return self._last_failure - self._down_since if self.trouble else 0.0

    async def _turn(self) -> None:
        """Waits for the rate's next free moment, and for the end of a pause, which holds for all requests."""
        while True:
            now = time.monotonic()
            start = max(self._next_start, self._resume_at)
            if start <= now:
                self._next_start = now + self._interval
                return
            await asyncio.sleep(start - now)

    async def close(self) -> None:
        await self._client.aclose()


def _read_json(reply: httpx.Response) -> object:
    try:
        return reply.json()
    except (ValueError, RecursionError):
        raise Refused(f"the answer is no JSON: {reply.text[:200]!r}") from None


def _retry_after(reply: httpx.Response) -> float:
    try:
        return min(float(reply.headers.get("retry-after", 0)), LONGEST_PAUSE_SECONDS)
    except ValueError:  # a date
        return 1.0
