"""The routes of operators: weights, pause and resume, version."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from inference.engine import Engine
from inference.model.load import dense_tensors
from inference.server.body import read_body
from inference.server.generation import Generations
from inference.server.refusal import Refusal
from inference.staged_update import StagedUpdate, stage_tensors
from olmorl.contract.errors import ModelError, WeightUpdateError, WorkerError

MAX_BODY_BYTES = 64 << 10


class UpdateBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    version: Annotated[StrictInt, Field(ge=0, lt=1 << 31)]
    kv: Literal["keep", "recompute"] = "keep"


class Operator:
    def __init__(self, generations: Callable[[], Generations]) -> None:
        self._get_generations = generations
        self._updating = asyncio.Lock()

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": self._engine.version})

    async def pause(self, request: Request) -> Response:
        """Answers once no step is made any more. Requests are taken and wait."""
        await self._do(self._generations.thread.pause)
        return JSONResponse({"paused": True})

    async def resume(self, request: Request) -> Response:
        await self._do(self._generations.thread.resume)
        return JSONResponse({"paused": False})

    async def update_weights(self, request: Request) -> Response:
        """Read a Hugging Face folder while the engine decodes, then swap between two steps. KV is kept, or recomputed
        with "kv": "recompute"."""
        content = await read_body(request, MAX_BODY_BYTES)
        try:
            body = UpdateBody.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise Refusal(400, f"{place or 'the body'}: {first['msg']}", param=place or None) from None
        async with self._updating:
            try:
                self._engine.check_version(body.version)
                staged = await asyncio.to_thread(self._stage, body.path)
                thread = self._generations.thread
                committed = thread.post(lambda: self._engine.commit(staged, body.version, kv=body.kv))
                stall = await asyncio.wrap_future(committed)
            except (ModelError, WeightUpdateError) as error:
                raise Refusal(400, str(error)) from None
            except WorkerError as error:
                raise Refusal(503, str(error)) from None
        return JSONResponse({"version": body.version, "stall_seconds": stall})

    @property
    def _generations(self) -> Generations:
        return self._get_generations()

    @property
    def _engine(self) -> Engine:
        return self._generations.engine

    def _stage(self, path: str) -> StagedUpdate:
        if not os.path.isdir(path):  # unlike Path.is_dir no error for what can be no name
            raise ModelError(f"{path!r} is no folder on the server")
        decoder = self._engine.decoder
        return stage_tensors(dense_tensors(Path(path)), decoder.specs, device=decoder.device, hold=decoder.hold)

    async def _do(self, work: object) -> None:
        try:
            await asyncio.to_thread(work)  # type: ignore[arg-type]
        except WorkerError as error:
            raise Refusal(503, str(error)) from None
