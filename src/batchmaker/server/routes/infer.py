"""Inference: tensors in, tensors out; and `generate`, with plain JSON instead of tensors, at once or as events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, aclosing

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from batchmaker.server.answers import EventStream, encoded
from batchmaker.server.bodies import HEADER_LENGTH, read_infer, write_infer
from batchmaker.server.generate_body import read_generate, write_generate
from batchmaker.server.messages import InferResponse
from batchmaker.server.parts import Endpoint, Site, caller_of, holder_of, named_model
from batchmaker.server.request_body import HeldBytes, unless_gone
from batchmaker.server.signature import Signature


def infer_routes(site: Site) -> list[Route]:
    """infer, generate and generate_stream, for the newest version of a model or one that is named."""
    service = site.service

    async def read(request: Request, held: HeldBytes) -> bytes:
        service.check_room(*named_model(request))
        return await held.read(request)

    async def infer(request: Request) -> Response:
        with site.bodies.holding(holder_of(request.scope)) as held:
            body = await read(request, held)
            asked = read_infer(body, request.headers.get(HEADER_LENGTH), service.limits)
            response = await unless_gone(request.scope, service.infer(*named_model(request), asked, caller_of(request)))
        content, json_length = write_infer(response, asked)
        if json_length is None:
            return encoded(content)
        headers = {HEADER_LENGTH: str(json_length)}
        return Response(content, media_type="application/octet-stream", headers=headers)

    async def generate(request: Request) -> Response:
        with site.bodies.holding(holder_of(request.scope)) as held:
            asked = read_generate(await read(request, held), signature(request))
            response = await unless_gone(request.scope, service.infer(*named_model(request), asked, caller_of(request)))
        return encoded(write_generate(response))

    async def generate_stream(request: Request) -> Response:
        with ExitStack() as stack:
            held = stack.enter_context(site.bodies.holding(holder_of(request.scope)))
            asked = read_generate(await read(request, held), signature(request))
            parts = service.stream(*named_model(request), asked, caller_of(request))
            first = await unless_gone(request.scope, _first(parts))  # its errors can still set the status
            return EventStream(_encoded_parts(first, parts, stack.pop_all()), service.limits.write_seconds)

    def signature(request: Request) -> Signature:
        return service.repository.get(*named_model(request)).signature

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
    first: list[InferResponse], rest: AsyncIterator[InferResponse], held: ExitStack
) -> AsyncIterator[bytes]:
    with held:
        async with aclosing(rest) as parts:  # type: ignore[type-var]
            for part in first:
                yield write_generate(part)
            async for part in parts:
                yield write_generate(part)
