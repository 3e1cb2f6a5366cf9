"""OpenAI's completions: a text that goes on with a prompt, at once or as events; and the models that write texts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import ExitStack, aclosing
from typing import Any, Final, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from batchmaker.server.access.departure import unless_gone
from batchmaker.server.access.sender import Sender, sender_of
from batchmaker.server.faults import FaultKind, ServiceError, invalid
from batchmaker.server.formats.completions import (
    MAX_TOKENS,
    CompletionAsk,
    Completions,
    Continuation,
    Writing,
    choices_of,
    read_ask,
    tokens_in,
)
from batchmaker.server.formats.openai_errors import openai_error
from batchmaker.server.http.answers import EventStream, as_json
from batchmaker.server.http.routes.endpoint import Endpoint
from batchmaker.server.service.served_model import ServedModel
from batchmaker.server.service.service import Service
from batchmaker.server.service.site import Site

_DONE: Final = b"[DONE]"


class _Job(NamedTuple):
    """What one call asks for."""

    ask: CompletionAsk
    completions: Completions
    choices: Sequence[Continuation]
    sender: Sender
    head: dict[str, Any]


class _Piece(NamedTuple):
    """New text of a choice. finished: why it has ended, with the number of its tokens."""

    number: int
    text: str
    finished: str | None = None
    num_tokens: int = 0


def completion_routes(site: Site) -> list[Route]:
    """completions, and the models that write texts: these, and those of transcriptions."""
    service = site.service
    started = int(time.time())

    def served(name: str) -> tuple[ServedModel, Completions]:
        model = service.repository.get(name, None)
        if model.completions is None:
            raise invalid(f"the model {name[:64]!r} writes no texts: it has no serving_completions()")
        return model, model.completions

    async def complete(request: Request) -> Response:
        """Continue one or several prompts: the whole texts as JSON, or their pieces as events."""
        with ExitStack() as stack:
            sender = sender_of(request.scope, site.keys)
            held = stack.enter_context(site.bodies.holding(sender.client))
            ask = read_ask(await held.read(request))
            model, completions = served(ask.model)
            choices = await site.bodies.pieces.finish(choices_of(ask, completions, model.signature, service.limits))
            head = {
                "id": f"cmpl-{request.state.request_id}",
                "object": "text_completion",
                "created": int(time.time()),
                "model": ask.model,
            }
            job = _Job(ask, completions, choices, sender, head)
            if not ask.stream:
                return as_json(await unless_gone(request.scope, _whole(service, job)))
            pieces = _pieces(service, job)
            first = await unless_gone(request.scope, anext(pieces))  # its errors can still set the status
            return EventStream(_events(first, pieces, job, stack.pop_all()), service.limits.write_seconds)

    def described(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": started, "owned_by": "batchmaker"}

    async def models(request: Request) -> Response:
        names = sorted({model.name for model in service.repository.models() if _writes(model)})
        return as_json({"object": "list", "data": [described(name) for name in names]})

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        if not _writes(service.repository.get(name, None)):
            raise ServiceError(FaultKind.NOT_FOUND, f"the model {name[:64]!r} writes no texts")
        return as_json(described(name))

    return [
        Route("/v1/completions", Endpoint(complete), methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{model}", model),
    ]


def _writes(model: ServedModel) -> bool:
    return model.completions is not None or model.transcriber is not None


async def _whole(service: Service, job: _Job) -> dict[str, Any]:
    """Return the answer with all texts. Cancelling the waiting task gives up what is not written yet."""
    texts = await _all([_text(service, job, choice) for choice in job.choices])
    choices = [
        {"text": choice.begin + text, "index": choice.number, "logprobs": None, "finish_reason": writing.finished}
        for choice, (text, writing) in zip(job.choices, texts, strict=True)
    ]
    return {**job.head, "choices": choices, "usage": _usage(job, sum(writing.num_tokens for _, writing in texts))}


async def _text(service: Service, job: _Job, choice: Continuation) -> tuple[str, Writing]:
    """Return one text. It is streamed only if it may end before its last token."""
    if job.ask.stops:
        text, writing = "", _writing(job)
        async with aclosing(_written(service, job, choice, writing)) as pieces:
            async for piece in pieces:
                text += piece
        return text, writing
    answer = await service.infer(job.ask.model, None, choice.request, job.sender)
    writing = _writing(job)
    text = "".join([writing.add(token) for token in tokens_in(answer.outputs)])
    return text + writing.end(), writing


def _writing(job: _Job) -> Writing:
    return Writing(job.completions, job.ask.stops, job.ask.max_tokens or MAX_TOKENS)


async def _written(service: Service, job: _Job, choice: Continuation, writing: Writing) -> AsyncGenerator[str, None]:
    """Yield the text of a choice as it comes, until it has ended; the model is then given up."""
    async with aclosing(service.stream(job.ask.model, None, choice.request, job.sender)) as parts:  # type: ignore[type-var]
        async for part in parts:
            for token in tokens_in(part.outputs):
                yield writing.add(token)
            if writing.finished is not None:
                return
    yield writing.end()


async def _pieces(service: Service, job: _Job) -> AsyncGenerator[_Piece, None]:
    """Yield the texts of all choices as they come, each with its end. Closing it gives up what is not written yet."""
    queue: asyncio.Queue[_Piece | BaseException] = asyncio.Queue()

    async def write(choice: Continuation) -> None:
        """Put the pieces of one choice into `queue` as they come, then its end, or the error that it failed with."""
        writing = _writing(job)
        if choice.begin:
            queue.put_nowait(_Piece(choice.number, choice.begin))
        try:
            async with aclosing(_written(service, job, choice, writing)) as texts:
                async for text in texts:
                    if text:
                        queue.put_nowait(_Piece(choice.number, text))
            queue.put_nowait(_Piece(choice.number, "", writing.finished, writing.num_tokens))
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.ensure_future(write(choice)) for choice in job.choices]
    try:
        num_unfinished = len(tasks)
        while num_unfinished:
            piece = await queue.get()
            if isinstance(piece, BaseException):
                raise piece
            num_unfinished -= piece.finished is not None
            yield piece
    finally:
        await _end(tasks)


async def _events(
    first: _Piece, rest: AsyncGenerator[_Piece, None], job: _Job, held: ExitStack
) -> AsyncIterator[bytes]:
    """Yield the events of a stream. An error after the first one is an event too, and the last."""
    with_usage = job.ask.stream_options is not None and job.ask.stream_options.include_usage
    common: dict[str, Any] = {**job.head, **({"usage": None} if with_usage else {})}
    num_tokens = 0

    def event(piece: _Piece) -> bytes:
        choice = {"text": piece.text, "index": piece.number, "logprobs": None, "finish_reason": piece.finished}
        return msgspec.json.encode({**common, "choices": [choice]})

    with held:
        async with aclosing(rest) as pieces:
            yield event(first)
            num_tokens += first.num_tokens
            try:
                async for piece in pieces:
                    num_tokens += piece.num_tokens
                    yield event(piece)
            except ServiceError as fault:
                if fault.kind is FaultKind.CANCELLED:
                    raise
                yield openai_error(fault.kind, str(fault))
                return
        if with_usage:
            yield msgspec.json.encode({**common, "choices": [], "usage": _usage(job, num_tokens)})
        yield _DONE


def _usage(job: _Job, num_tokens: int) -> dict[str, int]:
    read = sum(choice.num_prompt for choice in job.choices[:: job.ask.n or 1])
    return {"prompt_tokens": read, "completion_tokens": num_tokens, "total_tokens": read + num_tokens}


async def _all(work: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Return the results of all, or raise the first error; then, and when cancelled, all others are cancelled."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _end(tasks)


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
