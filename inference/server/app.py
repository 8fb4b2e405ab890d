"""The server as an ASGI application: which route answers what, who may ask, and what becomes of an error."""

import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from inference.engine import Engine
from inference.server.completions import Completions
from inference.server.generation import Generations
from inference.server.operator import Operator
from inference.server.options import ServerOptions
from inference.server.prometheus import ServerMetrics
from inference.server.refusal import Refusal
from olmorl.contract.errors import WorkerError

log = logging.getLogger(__name__)

OPEN = {"/health"}
OPERATOR = {"/pause", "/resume", "/update_weights"}
Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]


class Server:
    """Routes over one engine. Its parts that belong to an event loop are made when the application starts."""

    def __init__(self, engine: Engine, options: ServerOptions) -> None:
        self.engine = engine
        self.options = options
        self.model = options.model_name or engine.config.model
        self.metrics = ServerMetrics(self.model)
        self.generations: Generations
        self._completions: Completions
        self._operator = Operator(lambda: self.generations)

    def app(self) -> ASGIApp:
        routes = [
            Route("/health", self._health),
            Route("/version", self._operator.version),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._models),
            Route("/v1/models/{model:path}", self._one_model),
            Route("/v1/completions", _Plain(lambda *asgi: self._completions.complete(*asgi)), methods=["POST"]),
            Route("/v1/chat/completions", _Plain(lambda *asgi: self._completions.chat(*asgi)), methods=["POST"]),
            Route("/pause", self._operator.pause, methods=["POST"]),
            Route("/resume", self._operator.resume, methods=["POST"]),
            Route("/update_weights", self._operator.update_weights, methods=["POST"]),
        ]
        handlers: dict[Any, Any] = {Refusal: self._refuse, HTTPException: self._refuse_route, Exception: self._fail}
        app = Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)
        return _KeyCheck(app, self.options.api_key)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.generations = Generations(self.engine, max_samples=self.options.max_samples, on_end=self.metrics.ended)
        self._completions = Completions(self.generations, options=self.options, model=self.model)
        self.metrics.watch(self.generations)
        await self._completions.warm_up()
        try:
            yield
        finally:
            self.generations.close()
            self._completions.close()

    async def _health(self, request: Request) -> Response:
        try:
            self.generations.check()
        except WorkerError as error:
            raise Refusal(503, str(error)) from None
        return JSONResponse({"status": "ok", "version": self.engine.version})

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _one_model(self, request: Request) -> Response:
        if request.path_params["model"] != self.model:
            raise Refusal(404, f"this server has the model {self.model!r} alone", code="model_not_found")
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.model,
            "object": "model",
            "created": 0,
            "owned_by": "olmorl",
            "max_model_len": self.engine.max_model_len,
        }

    async def _refuse(self, request: Request, error: Refusal) -> Response:
        self.metrics.refused(error.status)
        return error.response()

    async def _refuse_route(self, request: Request, error: HTTPException) -> Response:
        path = request.url.path[:200]
        message = f"{path} takes {(error.headers or {}).get('Allow', 'another method')}, not {request.method}"
        if error.status_code == 404:
            message = f"there is no route {path}"
        response = await self._refuse(request, Refusal(error.status_code, message))
        response.headers.update(error.headers or {})
        return response

    async def _fail(self, request: Request, error: Exception) -> Response:
        self.metrics.refused(500)
        return Refusal(500, "this is a bug in the server; its log says more").response()


class _Plain:
    """An endpoint that sends for itself; Starlette takes a function for one that returns a response."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._endpoint(scope, receive, send)


class _KeyCheck:
    """Every route but /health wants the key, if there is one; those of operators are closed if there is none."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app = app
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            await refusal.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        path = scope["path"].rstrip("/") or "/"
        if path in OPEN:
            return None
        if self._key is None:
            closed = path in OPERATOR
            return Refusal(401, f"{path} is closed: the server was started without --api-key") if closed else None
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, token = given.partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._key):
            return None
        return Refusal(
            401, "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'", code="invalid_api_key"
        )
