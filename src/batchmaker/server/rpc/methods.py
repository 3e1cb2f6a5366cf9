"""Methods with one request and one response message."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, aclosing
from dataclasses import asdict
from typing import Any, Final, final

from batchmaker.server.faults import FaultKind, ServiceError
from batchmaker.server.formats.messages import InferRequest
from batchmaker.server.rpc.handlers import Answer, RpcCall
from batchmaker.server.rpc.wire import parameters_of, read_infer, write_infer
from batchmaker.server.service.descriptions import (
    EXTENSIONS,
    model_config,
    model_metadata,
    model_statistics,
    server_metadata,
)
from batchmaker.server.service.site import Site

_HTTP_ONLY: Final = frozenset({"binary_tensor_data", "generate"})


def unary_methods(site: Site) -> dict[str, Answer]:
    """Return the function of each method, by name."""
    return {**_describing(site), **_repository(site), "ModelInfer": EngineAnswers(site).whole}


@final
class EngineAnswers:
    """Inference by the engines of this process: StreamAnswers."""

    def __init__(self, site: Site) -> None:
        self._service = site.service

    def conversation(self) -> AbstractContextManager[None]:
        """Count one stream as open. UNAVAILABLE if the server was told to stop."""
        return self._service.conversation()

    async def whole(self, asked: Any, call: RpcCall) -> Any:
        """Return the whole answer. Raises ServiceError."""
        request, named = self._read(asked, call), (asked.model_name, asked.model_version)
        return write_infer(await self._service.infer(*named, request, call.sender, goes_on=call.is_stream))

    async def parts(self, asked: Any, call: RpcCall) -> AsyncGenerator[Any, None]:
        """Yield the values as they are computed. Raises ServiceError."""
        request, named = self._read(asked, call), (asked.model_name, asked.model_version)
        parts = self._service.stream(*named, request, call.sender, goes_on=call.is_stream)
        async with aclosing(parts):  # type: ignore[type-var]
            async for part in parts:
                yield write_infer(part)

    def _read(self, asked: Any, call: RpcCall) -> InferRequest:
        try:
            return read_infer(asked, self._service.limits, call.remaining_s)
        except ServiceError as fault:
            named, parameters = (asked.model_name, asked.model_version), parameters_of(asked.parameters)
            raise self._service.refused(*named, parameters, call.sender, fault) from fault.__cause__


def _describing(site: Site) -> dict[str, Answer]:
    repository = site.service.repository

    async def live(asked: Any, call: RpcCall) -> dict[str, Any]:
        return {"live": True}

    async def ready(asked: Any, call: RpcCall) -> dict[str, Any]:
        return {"ready": site.service.ready}

    async def model_ready(asked: Any, call: RpcCall) -> dict[str, Any]:
        try:
            served = repository.get(asked.name, asked.version)
        except ServiceError:
            return {"ready": False}
        return {"ready": site.service.takes(served)}

    async def server(asked: Any, call: RpcCall) -> dict[str, Any]:
        return {**server_metadata(), "extensions": [name for name in EXTENSIONS if name not in _HTTP_ONLY]}

    async def metadata(asked: Any, call: RpcCall) -> dict[str, Any]:
        served = repository.get(asked.name, asked.version)
        return model_metadata(served, repository.versions(served.name))

    async def config(asked: Any, call: RpcCall) -> dict[str, Any]:
        return {"config": model_config(repository.get(asked.name, asked.version))}

    async def statistics(asked: Any, call: RpcCall) -> dict[str, Any]:
        models = [repository.get(asked.name, asked.version)] if asked.name else repository.models()
        return {"model_stats": [model_statistics(model) for model in models]}

    return {
        "ServerLive": live,
        "ServerReady": ready,
        "ModelReady": model_ready,
        "ServerMetadata": server,
        "ModelMetadata": metadata,
        "ModelConfig": config,
        "ModelStatistics": statistics,
    }


def _repository(site: Site) -> dict[str, Answer]:
    repository = site.service.repository

    def check(asked: Any) -> None:
        if asked.repository_name:
            raise ServiceError(FaultKind.UNSUPPORTED, "there is one repository; leave repository_name empty")

    async def index(asked: Any, call: RpcCall) -> dict[str, Any]:
        check(asked)
        return {"models": [asdict(line) for line in await repository.index(ready_only=asked.ready)]}

    async def load(asked: Any, call: RpcCall) -> dict[str, Any]:
        """Load a model of the server's own sources. UNSUPPORTED with parameters; FORBIDDEN for keys that may not."""
        check(asked)
        site.keys.check_control(call.caller)
        if asked.parameters:
            raise ServiceError(
                FaultKind.UNSUPPORTED, "load takes no parameters: models are those of the server's own sources"
            )
        await repository.load(asked.model_name)
        return {}

    async def unload(asked: Any, call: RpcCall) -> dict[str, Any]:
        check(asked)
        site.keys.check_control(call.caller)
        await repository.unload(asked.model_name)
        return {}

    return {"RepositoryIndex": index, "RepositoryModelLoad": load, "RepositoryModelUnload": unload}
