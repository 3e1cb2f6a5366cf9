"""Inference: tensors in, tensors out; and `generate`, with plain JSON instead of tensors, at once or as events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, aclosing, contextmanager

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from batchmaker.server.access.departure import unless_gone
from batchmaker.server.access.request_body import HeldBytes
from batchmaker.server.access.sender import Sender, sender_of
from batchmaker.server.faults import ServiceError
from batchmaker.server.formats.generate_body import read_generate, write_generate
from batchmaker.server.formats.infer_body import HEADER_LENGTH, read_infer, write_infer
from batchmaker.server.formats.messages import InferRequest, InferResponse
from batchmaker.server.formats.parameters import parameters_in
from batchmaker.server.formats.signature import Signature
from batchmaker.server.http.answers import EventStream, encoded
from batchmaker.server.http.routes.endpoint import Endpoint, named_model
from batchmaker.server.service.site import Site


def infer_routes(site: Site) -> list[Route]:
    """infer, generate and generate_stream, for the newest version of a model or one that is named."""
    service, pieces = site.service, site.bodies.pieces

    async def read(request: Request, held: HeldBytes) -> bytes:
        service.check_room(*named_model(request))
        return await held.read(request)

    async def infer(request: Request) -> Response:
        """Answer tensors with tensors, as JSON or as JSON and bytes."""
        with site.bodies.holding(sender(request).client) as held:
            body, length = await read(request, held), request.headers.get(HEADER_LENGTH)
            with ending_sequences(request, body, length):
                inference = await pieces.finish(read_infer(body, length, signature(request), service.limits))
            response = await unless_gone(
                request.scope, service.infer(*named_model(request), inference, sender(request))
            )
        content, json_length = write_infer(response, inference, nulls=service.nulls)
        if json_length is None:
            return encoded(content)
        headers = {HEADER_LENGTH: str(json_length)}
        return Response(content, media_type="application/octet-stream", headers=headers)

    async def generate(request: Request) -> Response:
        with site.bodies.holding(sender(request).client) as held:
            inference = await read_plain(request, held)
            response = await unless_gone(
                request.scope, service.infer(*named_model(request), inference, sender(request))
            )
        return encoded(write_generate(response, nulls=service.nulls))

    async def generate_stream(request: Request) -> Response:
        """Answer plain JSON with events, one for each value. Errors before the first value set the status."""
        with ExitStack() as stack:
            held = stack.enter_context(site.bodies.holding(sender(request).client))
            inference = await read_plain(request, held)
            parts = service.stream(*named_model(request), inference, sender(request))
            first = await unless_gone(request.scope, _first(parts))  # its errors can still set the status
            return EventStream(
                _encoded_parts(first, parts, stack.pop_all(), nulls=service.nulls), service.limits.write_seconds
            )

    async def read_plain(request: Request, held: HeldBytes) -> InferRequest:
        body = await read(request, held)
        with ending_sequences(request, body):
            return await pieces.finish(read_generate(body, signature(request), service.limits))

    @contextmanager
    def ending_sequences(request: Request, body: bytes, json_length: str | None = None) -> Iterator[None]:
        """Read a body; if it is wrong, the sequence that it names has ended."""
        try:
            yield
        except ServiceError as fault:
            parameters = parameters_in(body, json_length)
            raise service.refused(*named_model(request), parameters, sender(request), fault) from fault.__cause__

    def signature(request: Request) -> Signature:
        return service.repository.get(*named_model(request)).signature

    def sender(request: Request) -> Sender:
        return sender_of(request.scope, site.keys)

    return [
        route
        for prefix in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
        for route in (
            Route(f"{prefix}/infer", Endpoint(infer), methods=["POST"]),
            Route(f"{prefix}/generate", Endpoint(generate), methods=["POST"]),
            Route(f"{prefix}/generate_stream", Endpoint(generate_stream), methods=["POST"]),
        )
    ]


async def _first(parts: AsyncIterator[InferResponse]) -> list[InferResponse]:
    """Return a list with the first part, empty if there is none."""
    try:
        return [await anext(parts)]
    except StopAsyncIteration:
        return []


async def _encoded_parts(
    first: list[InferResponse], rest: AsyncIterator[InferResponse], held: ExitStack, *, nulls: bool
) -> AsyncIterator[bytes]:
    with held:
        async with aclosing(rest) as parts:  # type: ignore[type-var]
            for part in first:
                yield write_generate(part, nulls=nulls)
            async for part in parts:
                yield write_generate(part, nulls=nulls)
