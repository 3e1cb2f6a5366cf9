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

    async def whole(self, message: Any, call: RpcCall) -> Any:
        """Return the whole answer. Raises ServiceError."""
        request, named = self._read(message, call), (message.model_name, message.model_version)
        return write_infer(await self._service.infer(*named, request, call.sender, goes_on=call.is_stream))

    async def parts(self, message: Any, call: RpcCall) -> AsyncGenerator[Any, None]:
        """Yield the values as they are computed. Raises ServiceError."""
        request, named = self._read(message, call), (message.model_name, message.model_version)
        parts = self._service.stream(*named, request, call.sender, goes_on=call.is_stream)
        async with aclosing(parts):  # type: ignore[type-var]
            async for part in parts:
                yield write_infer(part)

    def _read(self, message: Any, call: RpcCall) -> InferRequest:
        try:
            return read_infer(message, self._service.limits, call.remaining_s)
        except ServiceError as fault:
            named, parameters = (message.model_name, message.model_version), parameters_of(message.parameters)
            raise self._service.refused(*named, parameters, call.sender, fault) from fault.__cause__


def _describing(site: Site) -> dict[str, Answer]:
    repository = site.service.repository

    async def live(message: Any, call: RpcCall) -> dict[str, Any]:
        return {"live": True}

    async def ready(message: Any, call: RpcCall) -> dict[str, Any]:
        return {"ready": site.service.ready}

    async def model_ready(message: Any, call: RpcCall) -> dict[str, Any]:
        try:
            served = repository.get(message.name, message.version)
        except ServiceError:
            return {"ready": False}
        return {"ready": site.service.takes(served)}

    async def server(message: Any, call: RpcCall) -> dict[str, Any]:
        return {**server_metadata(), "extensions": [name for name in EXTENSIONS if name not in _HTTP_ONLY]}

    async def metadata(message: Any, call: RpcCall) -> dict[str, Any]:
        served = repository.get(message.name, message.version)
        return model_metadata(served, repository.versions(served.name))

    async def config(message: Any, call: RpcCall) -> dict[str, Any]:
        return {"config": model_config(repository.get(message.name, message.version))}

    async def statistics(message: Any, call: RpcCall) -> dict[str, Any]:
        models = [repository.get(message.name, message.version)] if message.name else repository.models()
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

    def check(message: Any) -> None:
        if message.repository_name:
            raise ServiceError(FaultKind.UNSUPPORTED, "there is one repository; leave repository_name empty")

    async def index(message: Any, call: RpcCall) -> dict[str, Any]:
        check(message)
        return {"models": [asdict(line) for line in await repository.index(ready_only=message.ready)]}

    async def load(message: Any, call: RpcCall) -> dict[str, Any]:
        """Load a model of the server's own sources. UNSUPPORTED with parameters; FORBIDDEN for keys that may not."""
        check(message)
        site.keys.check_control(call.caller)
        if message.parameters:
            raise ServiceError(
                FaultKind.UNSUPPORTED, "load takes no parameters: models are those of the server's own sources"
            )
        await repository.load(message.model_name)
        return {}

    async def unload(message: Any, call: RpcCall) -> dict[str, Any]:
        check(message)
        site.keys.check_control(call.caller)
        await repository.unload(message.model_name)
        return {}

    return {"RepositoryIndex": index, "RepositoryModelLoad": load, "RepositoryModelUnload": unload}
