"""The two routes that generate: parse, admit, start, then wait and write while the client is there."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from inference.server.answers import Answer, ChatAnswer, CompletionAnswer, TokenTexts
from inference.server.asked import ChatBody, CompletionBody, Wanted, deadline_seconds
from inference.server.body import read_body
from inference.server.chat import ChatPrompt, ChatPrompts, check_length
from inference.server.generation import Generation, Generations, ends, news
from inference.server.options import ServerOptions
from inference.server.reader import SampleReader
from inference.server.refusal import Refusal
from inference.tokenizer import Tokenizer
from olmorl.contract.errors import WorkerError
from olmorl.contract.generation import SamplingParams

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Work:
    """A parsed request."""

    prompts: list[list[int]]
    params: SamplingParams
    wanted: Wanted
    seconds: float
    answer: type[Answer]
    chat: ChatPrompt | None = None


class Completions:
    def __init__(self, generations: Generations, *, options: ServerOptions, model: str) -> None:
        self._generations = generations
        self._options = options
        self._model = model
        # Of its own: encoding may change a tokenizer's state while the engine decodes with another one.
        self._tokenizer = Tokenizer(generations.engine.folder)
        self._texts = TokenTexts(generations.engine.tokenizer)
        self._chats = ChatPrompts(self._tokenizer, max_prompt_tokens=generations.engine.max_prompt_tokens)
        self._num_encoding = 0
        """samples admitted whose prompts are being encoded"""
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encode")

    async def warm_up(self) -> None:
        """Load the tokenizers before the first request waits for them."""
        if self._tokenizer.exists:
            await self._encode(lambda: self._tokenizer.longest_token)
            self._generations.engine.tokenizer.decode([])

    def close(self) -> None:
        self._encoder.shutdown()

    async def complete(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = CompletionBody.parse(await read_body(Request(scope, receive), self._options.max_body_bytes))
        self._check_model(body.model)
        wanted = Wanted.of(body)
        params = body.params(max_tokens=16, num_logprobs=wanted.num_top)
        prompts = body.prompts
        with self._admitted(len(prompts) * params.n):
            encoded = [await self._encode(partial(self._encode_text, p)) if isinstance(p, str) else p for p in prompts]
        wanted.warnings.extend(self._cuts(body.max_tokens, encoded))
        seconds = deadline_seconds(body, self._options.request_seconds)
        await self._answer(Work(encoded, params, wanted, seconds, CompletionAnswer), scope, receive, send)

    async def chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = ChatBody.parse(await read_body(Request(scope, receive), self._options.max_body_bytes))
        self._check_model(body.model)
        wanted = Wanted.of(body)
        if body.max_tokens is None:
            body.max_tokens = body.max_completion_tokens
        params = body.params(max_tokens=self._generations.engine.max_model_len, num_logprobs=wanted.num_top)
        messages = body.plain_messages
        with self._admitted(params.n):
            options = body.chat_template_kwargs or {}
            prompt = await self._encode(partial(self._chats.encode, messages, tools=body.plain_tools, options=options))
        wanted.warnings.extend([*prompt.warnings, *self._cuts(body.max_tokens, [prompt.token_ids])])
        seconds = deadline_seconds(body, self._options.request_seconds)
        await self._answer(Work([prompt.token_ids], params, wanted, seconds, ChatAnswer, prompt), scope, receive, send)

    def _cuts(self, max_tokens: int | None, prompts: list[list[int]]) -> list[str]:
        """What to warn of when the context ends before the tokens that were asked for."""
        limit, longest = self._generations.engine.max_model_len, max(map(len, prompts))
        if max_tokens is None or longest + max_tokens <= limit:
            return []
        left = f"a prompt of {longest} tokens leaves {limit - longest} of this server's {limit}"
        return [f"max_tokens = {max_tokens} is cut: {left}"]

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self._model:
            raise Refusal(
                404,
                f"there is no model {model[:200]!r}; this server has {self._model!r}",
                param="model",
                code="model_not_found",
            )

    @contextmanager
    def _admitted(self, num_samples: int) -> Iterator[None]:
        """Their place is kept while their prompts are encoded; whoever starts them then must not wait in between."""
        limit = self._generations.max_samples
        if num_samples > limit:
            raise Refusal(400, f"n = {num_samples} samples in one request; this server holds {limit}", param="n")
        if self._generations.num_held + self._num_encoding + num_samples > limit:
            raise Refusal(429, f"{limit} samples are held already; try again later", code="queue_full")
        self._num_encoding += num_samples
        try:
            yield
        finally:
            self._num_encoding -= num_samples

    async def _encode(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._encoder, work)

    def _encode_text(self, text: str) -> list[int]:
        if not self._tokenizer.exists:
            raise Refusal(400, "this model has no tokenizer; give the prompt as token ids", param="prompt")
        check_length(text, self._tokenizer, self._generations.engine.max_prompt_tokens)
        return self._tokenizer.encode(text)

    async def _answer(self, work: Work, scope: Scope, receive: Receive, send: Send) -> None:
        with self._started(work) as generations:
            if work.wanted.stream:
                await unless_gone(self._stream(work, generations, send), receive)
            else:
                await unless_gone(self._whole(work, generations, scope, receive, send), receive)

    @contextmanager
    def _started(self, work: Work) -> Iterator[list[Generation]]:
        generations: list[Generation] = []
        timers: list[asyncio.TimerHandle] = []
        bell = asyncio.Event()
        try:
            for prompt in work.prompts:
                generations.append(self._start(prompt, work, bell))
                expire = generations[-1].expire
                reason = f"the deadline of {work.seconds:g} s passed"
                timers.append(asyncio.get_running_loop().call_later(work.seconds, expire, reason))
            yield generations
        finally:
            for timer in timers:
                timer.cancel()
            for generation in generations:
                generation.close()

    def _start(self, prompt: list[int], work: Work, bell: asyncio.Event) -> Generation:
        limit = self._generations.engine.max_model_len
        if len(prompt) >= limit:
            message = f"the prompt has {len(prompt)} tokens; it must be shorter than this server's {limit}"
            raise Refusal(400, message, param="prompt", code="context_length_exceeded")
        try:
            return self._generations.start(prompt, work.params, bell=bell, streamed=work.wanted.stream)
        except WorkerError as error:
            raise Refusal(503, str(error)) from None
        except ValueError as error:
            raise Refusal(400, str(error)) from None

    async def _whole(
        self, work: Work, generations: list[Generation], scope: Scope, receive: Receive, send: Send
    ) -> None:
        answer = self._new_answer(work, generations)
        try:
            await ends(generations)
        except WorkerError as error:
            raise Refusal(503, str(error)) from None
        await self._remember(work, generations)
        pieces = [piece for reader in self._readers(generations) if (piece := reader.read()) is not None]
        response = JSONResponse(answer.whole(pieces))
        await response(scope, receive, send)

    async def _stream(self, work: Work, generations: list[Generation], send: Send) -> None:
        """A piece is made only once the last one was taken: what a slow reader has not fetched is not even written."""
        answer, readers = self._new_answer(work, generations), self._readers(generations)
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")],
            }
        )
        await _send_events(send, answer.opening())
        try:
            while not all(reader.finished for reader in readers):
                await news(generations)
                pieces = [
                    (index, piece) for index, reader in enumerate(readers) if (piece := reader.read()) is not None
                ]
                await _send_events(send, [answer.chunk(index, piece) for index, piece in pieces])
            await _send_events(send, answer.closing())
            await self._remember(work, generations)
        except WorkerError as error:
            await _send_events(send, [Refusal(503, str(error)).body])
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    def _new_answer(self, work: Work, generations: list[Generation]) -> Answer:
        return work.answer(work.wanted, model=self._model, texts=self._texts, generations=generations)

    def _readers(self, generations: list[Generation]) -> list[SampleReader]:
        tokenizer = self._generations.engine.tokenizer
        return [SampleReader(g, index, tokenizer) for g in generations for index in range(g.params.n)]

    async def _remember(self, work: Work, generations: list[Generation]) -> None:
        """Before the answer is out: the next turn may come at once."""
        if work.chat is None:
            return
        answers: list[list[int]] = []
        for sequence in generations[0].sequences:
            if sequence.finish_reason in ("stop", "length") and sequence.stop_text is None:
                ids = sequence.output_ids
                answers.append(ids[:-1] if ids and ids[-1] in sequence.request.stop_ids else ids)
        await self._encode(partial(self._chats.remember, work.chat, answers))


async def unless_gone(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Do `work`, but stop at once when the client goes away."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_events(send: Send, events: Items[dict[str, Any]]) -> None:
    if events:
        lines = b"".join(b"data: %b\n\n" % json.dumps(event, ensure_ascii=False).encode() for event in events)
        await send({"type": "http.response.body", "body": lines, "more_body": True})
