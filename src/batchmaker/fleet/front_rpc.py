"""The front's gRPC: the same service as a replica's, with the same streams. Only what routing needs is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any, Final, final

import grpc
from grpc import aio

from batchmaker.fleet.balancer import Lease, Replica
from batchmaker.fleet.front import Front, unsupported_load
from batchmaker.fleet.links import Link
from batchmaker.fleet.routed_request import request_of_message
from batchmaker.fleet.upstream import NoAnswerError
from batchmaker.server.access.sender import HEADER as SENDER
from batchmaker.server.faults import FaultKind, ServiceError
from batchmaker.server.observe.request_ids import HEADER
from batchmaker.server.rpc.handlers import CODE, Answer, RpcCall
from batchmaker.server.rpc.schema import SERVICE, decode
from batchmaker.server.rpc.wire import FINAL

_KINDS: Final = {code: kind for kind, code in CODE.items()}
_UNREACHED: Final = "failed to connect"
"""How gRPC begins to say that a call was not sent, because nobody listens."""

_TRACED: Final = ("traceparent", "tracestate")
_DESCRIBING: Final = ("ModelReady", "ServerMetadata", "ModelMetadata", "ModelConfig", "RepositoryIndex")
"""Methods that any replica answers alike."""


def open_channel(address: str) -> Any:
    """Return a channel to a replica's gRPC server; addresses begin with grpc://."""
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    options += [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    return aio.insecure_channel(address.removeprefix("grpc://"), options=options)


@final
class FleetAnswers:
    """Inference by replicas: StreamAnswers. Each request of a stream goes to a replica of its own."""

    def __init__(self, front: Front) -> None:
        self._front = front

    def conversation(self) -> AbstractContextManager[None]:
        """Count one stream as open. UNAVAILABLE if the fleet is shutting down."""
        return self._front.conversation()

    async def whole(self, request: Any, call: RpcCall) -> Any:
        """Return the whole answer. Raises ServiceError."""
        return decode("ModelInferResponse", await self.passed(request, call))

    async def passed(self, request: Any, call: RpcCall) -> bytes:
        """Return the whole answer as its bytes. Raises ServiceError."""
        routed, data = request_of_message(request), request.SerializeToString()
        self._front.check_taken(routed, goes_on=call.is_stream)

        async def ask(lease: Lease) -> bytes:
            return await _called(lease.replica, "ModelInfer", data, call)

        lease, answer = await self._front.ask_one(routed, ask, call.sender)
        lease.end(answered=True)
        return answer

    async def parts(self, request: Any, call: RpcCall) -> AsyncGenerator[Any, None]:
        """Yield the values as they are computed. Raises ServiceError."""
        routed = request_of_message(request)
        self._front.check_taken(routed, goes_on=call.is_stream)
        stream: Any = None

        async def ask(lease: Lease) -> Any:
            """Open the stream to one replica, and return its first message. NoAnswerError if the replica has ended."""
            nonlocal stream
            link: Link = lease.replica.link
            stream = link.rpc.stream_stream(f"/{SERVICE}/ModelStreamInfer")(
                metadata=_metadata(link, call), timeout=call.remaining_s
            )

            async def begin() -> Any:
                await stream.write(request.SerializeToString())
                await stream.done_writing()
                return await stream.read()

            return await _guarded(lease.replica, begin())

        lease, said = await self._front.ask_one(routed, ask, call.sender)
        answered = False
        try:
            while said is not aio.EOF:
                message = decode("ModelStreamInferResponse", said)
                if message.error_message:
                    raise ServiceError(FaultKind.INTERNAL, message.error_message)
                if message.infer_response.parameters[FINAL].bool_param:
                    answered = True
                    return
                yield message.infer_response
                said = await _guarded(lease.replica, stream.read())
            await _guarded(lease.replica, _status_of(stream))
        except NoAnswerError:
            self._front.on_suspect(lease.replica)
            raise ServiceError(
                FaultKind.UNAVAILABLE, "the replica that computed this request has ended; try again", 1.0
            ) from None
        finally:
            stream.cancel()
            lease.end(answered=answered)


def fleet_methods(front: Front, answers: FleetAnswers) -> dict[str, Answer]:
    """Return the function of each method with one message, by name."""

    async def live(request: Any, call: RpcCall) -> dict[str, Any]:
        return {"live": True}

    async def ready(request: Any, call: RpcCall) -> dict[str, Any]:
        return {"ready": front.ready}

    async def statistics(request: Any, call: RpcCall) -> dict[str, Any]:
        raise ServiceError(
            FaultKind.UNSUPPORTED, "each replica has its own statistics: over HTTP, /v2/replicas/NUMBER/v2/models/stats"
        )

    async def load(request: Any, call: RpcCall) -> dict[str, Any]:
        raise unsupported_load()

    def described(method: str) -> Answer:
        """Return the function of a method that any replica can answer, because all have the same models."""

        async def describe(request: Any, call: RpcCall) -> bytes:
            replica = front.balancer.any_open()
            try:
                with replica.questioned():
                    return await _called(replica, method, request.SerializeToString(), call)
            except NoAnswerError:
                front.on_suspect(replica)
                raise ServiceError(FaultKind.UNAVAILABLE, "the replica has ended; try again", 1.0) from None

        return describe

    return {
        "ServerLive": live,
        "ServerReady": ready,
        "ModelStatistics": statistics,
        "RepositoryModelLoad": load,
        "RepositoryModelUnload": load,
        "ModelInfer": answers.passed,
        **{method: described(method) for method in _DESCRIBING},
    }


async def _called(replica: Replica, method: str, data: bytes, call: RpcCall) -> bytes:
    """Return a replica's answer to one message. NoAnswerError if the replica has ended; its errors as ServiceError."""
    link: Link = replica.link
    calling: Callable[..., Awaitable[bytes]] = link.rpc.unary_unary(f"/{SERVICE}/{method}")
    answer: bytes = await _guarded(replica, calling(data, metadata=_metadata(link, call), timeout=call.remaining_s))
    return answer


async def _guarded(replica: Replica, work: Awaitable[Any]) -> Any:
    """Return the result of a call to a replica. Replicas' errors have an id in their metadata, gRPC's have not."""
    try:
        return await work
    except aio.AioRpcError as error:
        trailing = dict(error.trailing_metadata() or ())
        if HEADER not in trailing and error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise NoAnswerError(error.details(), sent=not (error.details() or "").startswith(_UNREACHED)) from None
        after = trailing.get("retry-after")
        kind = _KINDS.get(error.code(), FaultKind.INTERNAL)
        raise ServiceError(kind, error.details() or "", None if after is None else float(after)) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if replica.state == "lost" and task is not None and not task.cancelling():
            raise NoAnswerError("the replica has ended") from None  # its channel was closed
        raise
    except (aio.UsageError, aio.InternalError) as error:  # its channel is closed
        raise NoAnswerError(str(error), sent=False) from None


async def _status_of(stream: Any) -> None:
    """Raise the error that ended a stream, if one did."""
    code = await stream.code()
    if code is not grpc.StatusCode.OK:
        raise aio.AioRpcError(code, aio.Metadata(), await stream.trailing_metadata(), await stream.details())


def _metadata(link: Link, call: RpcCall) -> tuple[tuple[str, str], ...]:
    traced = ((name, call.metadata[name]) for name in _TRACED if name in call.metadata)
    return (
        ("x-api-key", link.key_of(call.caller)),
        (HEADER, call.request_id),
        (SENDER, call.sender.forwarded),
        *traced,
    )
