"""Reading a request body, of bounded size and in bounded time."""

import asyncio

from starlette.requests import ClientDisconnect, Request

from inference.server.refusal import Refusal

BODY_SECONDS = 60.0


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Raises Refusal. A client that leaves meanwhile is refused too; nobody reads that."""
    length = request.headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit():
        raise Refusal(400, f"content-length is {length[:32]!r}")
    if int(length) > max_bytes:
        raise _too_large(max_bytes)
    content = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                content += part
                if len(content) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError:
        raise Refusal(400, f"the body did not come within {BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise Refusal(400, "the client went away") from None
    return bytes(content)


def _too_large(max_bytes: int) -> Refusal:
    return Refusal(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")
