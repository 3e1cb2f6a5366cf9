"""Inference: tensors in, tensors out; and `generate`, with plain JSON instead of tensors, at once or as events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, aclosing

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
from batchmaker.server.http.answers import EventStream, encoded
from batchmaker.server.http.routes.endpoint import Endpoint, ModelName, named_model
from batchmaker.server.service.site import Site


def infer_routes(site: Site) -> list[Route]:
    """infer, generate and generate_stream, for the newest version of a model or one that is named."""
    service, pieces = site.service, site.bodies.pieces

    async def infer(request: Request) -> Response:
        """Answer tensors with tensors, as JSON or as JSON and bytes."""
        name, sender = named_model(request), sender_of(request.scope, site.keys)
        with site.bodies.holding(sender.client) as held:
            service.check_open_for(*name)
            body, length = await held.read(request), request.headers.get(HEADER_LENGTH)
            try:
                signature = service.repository.get(*name).signature
                inference = await pieces.finish(read_infer(body, length, signature, service.limits))
            except ServiceError as fault:
                raise service.refused(*name, parameters_in(body, length), sender, fault) from fault.__cause__
            response = await unless_gone(request.scope, service.infer(*name, inference, sender))
        content, json_length = write_infer(response, inference, nulls=service.nulls)
        if json_length is None:
            return encoded(content)
        headers = {HEADER_LENGTH: str(json_length)}
        return Response(content, media_type="application/octet-stream", headers=headers)

    async def generate(request: Request) -> Response:
        name, sender = named_model(request), sender_of(request.scope, site.keys)
        with site.bodies.holding(sender.client) as held:
            inference = await read_plain(request, name, sender, held)
            response = await unless_gone(request.scope, service.infer(*name, inference, sender))
        return encoded(write_generate(response, nulls=service.nulls))

    async def generate_stream(request: Request) -> Response:
        """Answer plain JSON with events, one for each value. Errors before the first value set the status."""
        name, sender = named_model(request), sender_of(request.scope, site.keys)
        with ExitStack() as stack:
            held = stack.enter_context(site.bodies.holding(sender.client))
            inference = await read_plain(request, name, sender, held)
            parts = service.stream(*name, inference, sender)
            first = await unless_gone(request.scope, _first(parts))  # its errors can still set the status
            return EventStream(
                _encoded_parts(first, parts, stack.pop_all(), nulls=service.nulls), service.limits.write_seconds
            )

    async def read_plain(request: Request, name: ModelName, sender: Sender, held: HeldBytes) -> InferRequest:
        """Read a body without tensors; if it is wrong, the sequence that it names has ended."""
        service.check_open_for(*name)
        body = await held.read(request)
        try:
            signature = service.repository.get(*name).signature
            return await pieces.finish(read_generate(body, signature, service.limits))
        except ServiceError as fault:
            raise service.refused(*name, parameters_in(body), sender, fault) from fault.__cause__

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
