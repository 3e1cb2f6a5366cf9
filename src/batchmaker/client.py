"""A client for what `tritonclient` lacks: values as a model generates them, and sequences over WebSockets, on asyncio.

Needs httpx and websockets, and no part of this package that needs torch: `pip install 'batchmaker[client]'`.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Mapping
from contextlib import aclosing, asynccontextmanager
from types import TracebackType
from typing import Any, Final, Self, final
from urllib.parse import quote, urlencode

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from batchmaker.errors import BatchmakerError, OptionError

Parameter = bool | int | float | str
"""A parameter's value, for example of `deadline_ms`, `priority` or `sequence_id`."""

_META: Final = frozenset({"model_name", "model_version", "id"})
_CONNECT_S: Final = 10.0


@final
class ServerError(BatchmakerError):
    """The server refused a request, or could not finish it. The message is the server's own.

    status: of HTTP; None if the answer had begun. retry_after_s: when to try again, if that may help.
    """

    def __init__(self, message: str, status: int | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


def generate(
    address: str,
    model: str,
    inputs: Mapping[str, Any],
    *,
    version: str | None = None,
    parameters: Mapping[str, Parameter] | None = None,
    key: str | None = None,
    transport: Any = None,
) -> Generated:
    """Ask a server for one answer, and return its values as they are computed: for `for`, and for `async for`.

        for part in generate("http://127.0.0.1:8000", "seq2seq", {"source": [3, 4, 5]}):
            print(part["output_0"])

    Each part is a dict of the outputs by name. For the arguments see Client and `Client.stream`, which asks over
    connections that it keeps. The request begins with the iteration; leaving it early gives the request up. Raises
    OptionError for a wrong address at once, and ServerError in the iteration: before the first value with a status,
    after it without one.
    """
    return Generated(address, model, inputs, version, parameters, key, transport)


@final
class Generated:
    """One answer of a server, to be iterated once; see `generate`."""

    def __init__(
        self,
        address: str,
        model: str,
        inputs: Mapping[str, Any],
        version: str | None,
        parameters: Mapping[str, Parameter] | None,
        key: str | None,
        transport: Any,
    ) -> None:
        self._options = _options(address, key, transport)
        self._path = f"{_path(model, version)}/generate_stream"
        self._body = _body(inputs, parameters)

    def __iter__(self) -> Generator[dict[str, Any], None, None]:
        with httpx.Client(**self._options) as http:
            try:
                with http.stream("POST", self._path, json=self._body) as answer:
                    if answer.status_code != httpx.codes.OK:
                        raise _refusal(answer.status_code, answer.headers, answer.read())
                    rest = b""
                    for some in answer.iter_bytes():
                        *whole, rest = (rest + some).split(b"\n\n")
                        yield from map(_part, whole)
            except httpx.HTTPError as error:
                raise _gone(error) from error

    async def __aiter__(self) -> AsyncGenerator[dict[str, Any], None]:
        async with (
            httpx.AsyncClient(**self._options) as http,
            aclosing(_streamed(http, self._path, self._body)) as parts,
        ):
            async for part in parts:
                yield part


@final
class Client:
    """Asks one server, over connections that it keeps; any number of requests at once.

        async with Client("http://127.0.0.1:8000") as client:
            async for part in client.stream("seq2seq", {"source": [3, 4, 5]}):
                print(part["output_0"])

    address: begins with http:// or https://, else OptionError. key: an API key. transport: instead of the network,
    for tests.
    """

    def __init__(
        self, address: str, *, key: str | None = None, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        options = _options(address, key, transport)
        self._headers: dict[str, str] = options["headers"]
        self._sockets = "ws" + address.removeprefix("http").rstrip("/")
        self._http = httpx.AsyncClient(**options)

    async def stream(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: str | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield each value as soon as it arrives, as a dict of the outputs by name.

        inputs: numbers, strings, or lists of them, by name. parameters: as in the server's documentation. Leaving the
        iteration closes the connection, and the server gives the request up. Use `contextlib.aclosing` to control when
        this happens. Raises ServerError: before the first value with a status, after it without one.
        """
        path = f"{_path(model, version)}/generate_stream"
        async with aclosing(_streamed(self._http, path, _body(inputs, parameters))) as parts:
            async for part in parts:
                yield part

    @asynccontextmanager
    async def open_sequence(
        self, model: str, *, version: str | None = None, parameters: Mapping[str, Parameter] | None = None
    ) -> AsyncIterator[OpenSequence]:
        """Begin a sequence on a connection of its own; it ends with the block, with whatever is not answered.

            async with client.open_sequence("listener") as sequence:
                async for chunk in microphone:
                    print(await sequence.submit(chunk))

        parameters: of every chunk: deadline_ms, priority, or the output wanted. Raises ServerError, with a status
        where the server has refused.
        """
        path = _path(model, version)
        try:
            answer = await self._http.get(f"{path}/config")
        except httpx.HTTPError as error:
            raise _gone(error) from error
        if answer.status_code != httpx.codes.OK:
            raise _refusal(answer.status_code, answer.headers, answer.content)
        address = f"{self._sockets}{path}/sequence?{urlencode(parameters or {})}"
        try:
            # No pings: behind megabytes of chunks that the server has not read, one would be answered too late
            socket = await connect(
                address, additional_headers=self._headers, compression=None, max_size=None, ping_interval=None
            )
        except InvalidStatus as error:
            refused = error.response
            raise _refusal(refused.status_code, refused.headers, bytes(refused.body or b"")) from None
        except (OSError, InvalidHandshake) as error:
            raise _gone(error) from error
        sequence = OpenSequence(socket, answer.json()["input"])
        try:
            yield sequence
        finally:
            await sequence.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _options(address: str, key: str | None, transport: Any) -> dict[str, Any]:
    """Return the options of an HTTP client for a server. OptionError for a wrong address."""
    if not address.startswith(("http://", "https://")):
        raise OptionError(
            f"address {address!r} must begin with http:// or https://: give http://localhost:8000, for example"
        )
    return {
        "base_url": address,
        "headers": {} if key is None else {"X-API-Key": key},
        # No limit on reading: the request's own deadline limits the time of a value
        "timeout": httpx.Timeout(None, connect=_CONNECT_S),
        "limits": httpx.Limits(max_connections=None),
        "transport": transport,
    }


def _body(inputs: Mapping[str, Any], parameters: Mapping[str, Parameter] | None) -> dict[str, Any]:
    return {**inputs, "parameters": dict(parameters)} if parameters else dict(inputs)


async def _streamed(
    http: httpx.AsyncClient, path: str, body: Mapping[str, Any]
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield each part of an answer. Bytes may be split anywhere. Raises ServerError."""
    try:
        async with http.stream("POST", path, json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                raise _refusal(answer.status_code, answer.headers, await answer.aread())
            rest = b""
            async for some in answer.aiter_bytes():
                *whole, rest = (rest + some).split(b"\n\n")
                for event in whole:
                    yield _part(event)
    except httpx.HTTPError as error:
        raise _gone(error) from error


def _part(event: bytes) -> dict[str, Any]:
    """Return the outputs in an event, its `data:` line. Raises the ServerError that it may hold."""
    given = json.loads(event.removeprefix(b"data: "))
    if "error" in given:
        raise ServerError(given["error"])
    return {name: value for name, value in given.items() if name not in _META}


def _path(model: str, version: str | None) -> str:
    path = f"/v2/models/{quote(model, safe='')}"
    return path if version is None else f"{path}/versions/{quote(version, safe='')}"


def _gone(error: Exception) -> ServerError:
    return ServerError(f"the server cannot be reached, or has gone: {error or type(error).__name__}")


def _refusal(status: int, headers: Mapping[str, str], body: bytes) -> ServerError:
    """Return the error in an unsuccessful answer of any server."""
    try:
        said = str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        said = f"the answer is {status} {httpx.codes.get_reason_phrase(status)}, and not from batchmaker"
    after = headers.get("retry-after", "")
    return ServerError(said, status, float(after) if after.isdigit() else None)


_FORMATS: Final = {
    "BOOL": "?", "UINT8": "B", "UINT16": "H", "UINT32": "IL", "UINT64": "LQ", "INT8": "b", "INT16": "h", "INT32": "il",
    "INT64": "lq", "FP16": "e", "FP32": "f", "FP64": "d",
}  # fmt: skip
"""The formats of each datatype in Python's buffers. Datatypes with two formats are distinguished by size."""

_SIZES: Final = {"UINT32": 4, "INT32": 4, "UINT64": 8, "INT64": 8}


@final
class OpenSequence:
    """A sequence on its own connection: chunks in, answers out, in order.

    Made by `Client.open_sequence`. For one event loop.
    """

    def __init__(self, socket: ClientConnection, inputs: list[dict[str, Any]]) -> None:
        """inputs: of the model, as in its configuration."""
        self._socket = socket
        required = [given for given in inputs if not given["optional"]] or inputs
        self._datatype: str | None = required[0]["data_type"].removeprefix("TYPE_") if len(required) == 1 else None
        self._waiting: deque[asyncio.Future[dict[str, Any]]] = deque()
        self._sending = asyncio.Lock()
        self._over: ServerError | None = None
        self._reading = asyncio.create_task(self._read())

    @property
    def num_waiting(self) -> int:
        """Chunks that were sent and are not answered."""
        return len(self._waiting)

    async def submit(self, chunk: Any, *, parameters: Mapping[str, Parameter] | None = None) -> dict[str, Any]:
        """Return a chunk's answer, as a dict of the outputs by name.

        chunk: the values of the model's only tensor, as an array (anything with Python's buffer protocol) of its
        datatype, or as bytes; or a dict of the inputs by name, which may have its own parameters. The next may be
        submitted before the last is answered; while the server has too many chunks, this waits. Raises ServerError:
        with a status for this chunk alone, without one if the connection is over. OptionError for an array of another
        datatype.
        """
        message = self._message(chunk, parameters)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        async with self._sending:
            if self._over is not None:
                raise self._over
            self._waiting.append(answer)
            try:
                await self._socket.send(message)
            except ConnectionClosed:
                answer.cancel()
                await self._reading
                raise self._said() from None
        return await answer

    def _message(self, chunk: Any, parameters: Mapping[str, Parameter] | None) -> bytes | str:
        if isinstance(chunk, Mapping):
            return json.dumps({**chunk, "parameters": dict(parameters)} if parameters else dict(chunk))
        if parameters:
            raise OptionError("a chunk of bytes has no parameters: give them to open_sequence, or send a dict")
        try:
            view = memoryview(chunk)
        except TypeError:
            raise OptionError(
                f"a chunk must be an array, bytes or a dict of inputs, got {type(chunk).__name__}. Give "
                "np.asarray(values, dtype), or {NAME: values}"
            ) from None
        kind = _FORMATS.get(self._datatype or "")
        size = _SIZES.get(self._datatype or "", view.itemsize)
        raw = isinstance(chunk, bytes | bytearray)
        if kind is not None and not raw and (view.format not in list(kind) or view.itemsize != size):
            raise OptionError(
                f"the chunk holds {view.format!r} of {view.itemsize} bytes, and the model takes {self._datatype}: "
                "convert it, with array.astype(...) for example"
            )
        return view.tobytes()

    async def _read(self) -> None:
        """Hand answers to the waiting callers, in order, until the connection is over."""
        try:
            async for text in self._socket:
                answer = json.loads(text)
                waiting = self._waiting.popleft()
                if waiting.done():
                    continue  # nobody waits any more
                if "error" in answer:
                    waiting.set_exception(ServerError(answer["error"], answer["status"], answer.get("retry_after_s")))
                else:
                    waiting.set_result({name: value for name, value in answer.items() if name not in _META})
        except ConnectionClosed:
            pass
        self._over = self._said()
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_exception(self._over)

    def _said(self) -> ServerError:
        code, reason = self._socket.close_code, self._socket.close_reason
        return ServerError(f"the connection is over: {reason or 'it was closed'} ({code})")

    async def aclose(self) -> None:
        """End the sequence and give up unanswered chunks. A second call has no effect."""
        await self._socket.close()
        await self._reading
