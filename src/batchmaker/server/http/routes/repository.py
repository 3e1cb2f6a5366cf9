"""The model repository: its index, loading and unloading."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from batchmaker.server.access.sender import sender_of
from batchmaker.server.faults import FaultKind, ServiceError
from batchmaker.server.formats.infer_body import decode_json
from batchmaker.server.http.answers import as_json
from batchmaker.server.service.site import Site


class _Ask(msgspec.Struct):
    """parameters: not read, whatever is in them."""

    ready: bool = False
    parameters: msgspec.Raw = msgspec.Raw(b"{}")

    @property
    def has_parameters(self) -> bool:
        return bytes(self.parameters).translate(None, b" \t\r\n") not in (b"{}", b"null")


_ASK = msgspec.json.Decoder(_Ask)


def repository_routes(site: Site) -> list[Route]:
    """Index, load and unload."""
    repository = site.service.repository

    async def read_ask(request: Request) -> _Ask:
        with site.bodies.holding(sender_of(request.scope, site.keys).client) as held:
            body = await held.read(request)
        ask: _Ask = decode_json(_ASK, body) if body.strip() else _Ask()
        return ask

    async def index(request: Request) -> Response:
        ask = await read_ask(request)
        return as_json(await repository.index(ready_only=ask.ready))

    async def load(request: Request) -> Response:
        site.keys.check_control(request.state.caller)
        if (await read_ask(request)).has_parameters:
            raise ServiceError(
                FaultKind.UNSUPPORTED, "load takes no parameters: models are those of the server's own sources"
            )
        await repository.load(request.path_params["model"])
        return as_json({})

    async def unload(request: Request) -> Response:
        site.keys.check_control(request.state.caller)
        await read_ask(request)
        await repository.unload(request.path_params["model"])
        return as_json({})

    return [
        Route("/v2/repository/index", index, methods=["POST"]),
        Route("/v2/repository/models/{model}/load", load, methods=["POST"]),
        Route("/v2/repository/models/{model}/unload", unload, methods=["POST"]),
    ]
