"""A client for what `tritonclient` lacks: values as a model generates them, and sequences over WebSockets, on asyncio.

Needs httpx and websockets, and no part of this package that needs torch: `pip install 'batchmaker[client]'`.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import struct
import sys
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, final
from urllib.parse import quote, urlencode

from batchmaker.errors import BatchmakerError, OptionError, needing

with needing("client", "batchmaker.client"):
    import httpx
    from websockets.asyncio.client import ClientConnection, connect
    from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

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
        self,
        model: str,
        *,
        version: str | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        state: bytes | None = None,
    ) -> AsyncIterator[OpenSequence]:
        """Begin a sequence on a connection of its own; it ends with the block, with whatever is not answered.

            async with client.open_sequence("listener") as sequence:
                async for chunk in microphone:
                    print(await sequence.submit(chunk))

        parameters: of every chunk: deadline_ms, priority, or the output wanted. state: to go on from; see
        `OpenSequence.state`. Raises ServerError, with a status where the server has refused.
        """
        path = _path(model, version)
        config = await self._config(path)
        sequence = OpenSequence(await self._connect(f"{path}/sequence", parameters), _Chunks(config["input"]))
        try:
            if state is not None:
                await sequence.go_on(state)
            yield sequence
        finally:
            await sequence.aclose()

    @asynccontextmanager
    async def open_sequences(
        self, model: str, *, version: str | None = None, parameters: Mapping[str, Parameter] | None = None
    ) -> AsyncIterator[SequencesConnection]:
        """Open one connection for many sequences; they end with the block, with whatever is not answered.

            async with client.open_sequences("listener") as sequences:
                async with sequences.open() as call:
                    print(await call.submit(chunk))

        parameters: of every chunk: deadline_ms, priority, or the output wanted. Raises ServerError as `open_sequence`.
        """
        path = _path(model, version)
        config = await self._config(path)
        form = _values_form(config["output"], (parameters or {}).get("output"))
        ahead = int(config.get("parameters", {}).get("max_chunks_ahead", {}).get("string_value", 1))
        query = {**(parameters or {}), "answers": "json" if form is None else "binary"}
        socket = await self._connect(f"{path}/sequences", query)
        connection = SequencesConnection(socket, _Chunks(config["input"]), form, ahead)
        try:
            yield connection
        finally:
            await connection.aclose()

    async def _config(self, path: str) -> dict[str, Any]:
        try:
            answer = await self._http.get(f"{path}/config")
        except httpx.HTTPError as error:
            raise _gone(error) from error
        if answer.status_code != httpx.codes.OK:
            raise _refusal(answer.status_code, answer.headers, answer.content)
        config: dict[str, Any] = answer.json()
        return config

    async def _connect(self, path: str, parameters: Mapping[str, Parameter] | None) -> ClientConnection:
        address = f"{self._sockets}{path}?{urlencode(parameters or {})}"
        try:
            # No pings: behind megabytes of chunks that the server has not read, one would be answered too late
            return await connect(
                address, additional_headers=self._headers, compression=None, max_size=None, ping_interval=None
            )
        except InvalidStatus as error:
            refused = error.response
            raise _refusal(refused.status_code, refused.headers, bytes(refused.body or b"")) from None
        except (OSError, InvalidHandshake) as error:
            raise _gone(error) from error

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
    content = json.loads(event.removeprefix(b"data: "))
    if "error" in content:
        raise ServerError(content["error"])
    return {name: value for name, value in content.items() if name not in _META}


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
class _Chunks:
    """How a model's chunks are written. inputs: of the model, as in its configuration."""

    def __init__(self, inputs: list[dict[str, Any]]) -> None:
        required = [spec for spec in inputs if not spec["optional"]] or inputs
        self._datatype: str | None = required[0]["data_type"].removeprefix("TYPE_") if len(required) == 1 else None
        self._name: str = required[0]["name"]

    def raw(self, chunk: Any, parameters: Mapping[str, Parameter] | None) -> bytes | dict[str, Any]:
        """Return the values of a chunk, or the object that is its JSON. OptionError for an array that does not fit."""
        if isinstance(chunk, Mapping):
            content = dict(chunk)
            return {**content, "parameters": {**content.get("parameters", {}), **parameters}} if parameters else content
        if parameters:
            raise OptionError("a chunk of bytes has no parameters: give them to open_sequence, or send a dict")
        return self._view(chunk).tobytes()

    def last(self, chunk: Any, parameters: Mapping[str, Parameter] | None) -> dict[str, Any]:
        """Return the object that is the JSON of the last chunk of a connection."""
        if not isinstance(chunk, Mapping):
            if isinstance(chunk, bytes | bytearray):
                raise OptionError("the last chunk must be an array or a dict of inputs here; bytes have no end")
            chunk = {self._name: self._view(chunk).tolist()}
        marked = self.raw(chunk, {**(parameters or {}), "sequence_end": True})
        assert isinstance(marked, dict)
        return marked

    def _view(self, chunk: Any) -> memoryview:
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
        return view


@final
class OpenSequence:
    """A sequence on its own connection: chunks in, answers out, in order.

    Made by `Client.open_sequence`. For one event loop.
    """

    def __init__(self, socket: ClientConnection, chunks: _Chunks) -> None:
        self._socket = socket
        self._chunks = chunks
        self._waiting: deque[asyncio.Future[dict[str, Any]]] = deque()
        self._sending = asyncio.Lock()
        self._error: ServerError | None = None
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
        message = self._chunks.raw(chunk, parameters)
        return await self._ask(message if isinstance(message, bytes) else json.dumps(message))

    async def finish(
        self, chunk: Any = None, *, parameters: Mapping[str, Parameter] | None = None
    ) -> dict[str, Any] | None:
        """Return the answer to the last chunk, an array or a dict; the sequence ends with it. Raises as `submit`.

        Without a chunk it is what a model with look-ahead has kept back; None of other models.
        """
        message = {"end": True} if chunk is None else self._chunks.last(chunk, parameters)
        answer = await self._ask(json.dumps(message))
        return None if answer == {"end": True} else answer

    async def reset(self) -> None:
        """Have the chunks that are submitted from now on begin from no state."""
        await self._ask('{"reset":true}')

    async def state(self) -> bytes:
        """Return the state after all chunks so far: `open_sequence(state=...)` goes on from it, at any server."""
        return base64.b64decode((await self._ask('{"state":true}'))["state"])

    async def go_on(self, state: bytes) -> None:
        """Begin from a state, before the first chunk; see `Client.open_sequence`."""
        await self._ask(json.dumps({"open": {"state": base64.b64encode(state).decode("ascii")}}))

    async def _ask(self, message: bytes | str) -> dict[str, Any]:
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        async with self._sending:
            if self._error is not None:
                raise self._error
            self._waiting.append(answer)
            try:
                await self._socket.send(message)
            except ConnectionClosed:
                answer.cancel()
                await self._reading
                raise _closing_error(self._socket) from None
        return await answer

    async def _read(self) -> None:
        """Hand answers to the waiting callers, in order, until the connection is over."""
        try:
            async for text in self._socket:
                _settle(self._waiting.popleft(), json.loads(text))
        except ConnectionClosed:
            pass
        self._error = _closing_error(self._socket)
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_exception(self._error)

    async def aclose(self) -> None:
        """End the sequence and give up unanswered chunks. A second call has no effect."""
        await self._socket.close()
        await self._reading


def _settle(waiting: asyncio.Future[dict[str, Any]], answer: dict[str, Any]) -> None:
    """Give an answer, or an error, to who waits for it; nobody may any more."""
    if waiting.done():
        return
    if "error" in answer:
        waiting.set_exception(ServerError(answer["error"], answer["status"], answer.get("retry_after_s")))
    else:
        waiting.set_result({name: value for name, value in answer.items() if name not in _META})


def _closing_error(socket: ClientConnection) -> ServerError:
    code, reason = socket.close_code, socket.close_reason
    return ServerError(f"the connection is over: {reason or 'it was closed'} ({code})")


# --- many sequences over one connection -------------------------------------------------------------------------------

_HEAD: Final = struct.Struct("<IBBHI")
"""Of a frame: number of the sequence, flags, kind of the content, 0, bytes of the content."""

_BEGIN, _END, _RESET, _GIVE_UP = 1, 2, 4, 8
_VALUES, _NOTHING, _STATE = 0, 1, 2


class _ValuesForm(NamedTuple):
    """The only output of binary answers. shape: -1 for the dimension that varies."""

    name: str
    format: str
    shape: tuple[int, ...]

    def read(self, content: bytes) -> Any:
        """Return values as nested lists, or a single one, as JSON has them."""
        values: Any = memoryview(content)
        flat = values.cast(self.format)
        if self.shape == (1,):
            return flat[0]
        if len(self.shape) == 1:
            return flat.tolist()
        count = 1
        for size in self.shape:
            count *= size if size != -1 else 1
        shape = [len(flat) // count if size == -1 else size for size in self.shape]
        return values.cast(self.format, shape).tolist() if len(flat) else []


def _values_form(outputs: list[dict[str, Any]], wanted: Parameter | None) -> _ValuesForm | None:
    """Return how answers are read as values; None if they have to be JSON."""
    named = [output for output in outputs if wanted is None or output["name"] == wanted]
    if len(named) != 1:
        return None
    datatype, shape = named[0]["data_type"].removeprefix("TYPE_"), tuple(named[0]["dims"])
    if datatype not in _FORMATS or datatype == "FP16" or shape.count(-1) > 1 or 0 in shape or sys.byteorder != "little":
        return None
    return _ValuesForm(named[0]["name"], _FORMATS[datatype][-1], shape)


@final
class SequencesConnection:
    """Many sequences over one connection; made by `Client.open_sequences`. For one event loop.

    What is sent in one turn of the event loop leaves in one message.
    """

    def __init__(self, socket: ClientConnection, chunks: _Chunks, form: _ValuesForm | None, ahead: int) -> None:
        """form: of the answers; None for JSON. ahead: frames of one sequence that may be sent before their answers."""
        self.chunks = chunks
        self.ahead = ahead
        self._socket = socket
        self._form = form
        self._open: dict[int, CarriedSequence] = {}
        self._numbers = itertools.count()
        self._frames: list[bytes | str] = []
        self._sending: asyncio.Task[None] | None = None
        self._error: ServerError | None = None
        self._reading = asyncio.create_task(self._read())

    @asynccontextmanager
    async def open(self, *, state: bytes | None = None) -> AsyncIterator[CarriedSequence]:
        """Begin a sequence; it ends with the block, with whatever is not answered. state: to go on from.

        Raises ServerError, with a status where the server has refused.
        """
        if self._error is not None:
            raise self._error
        number = next(self._numbers) & 0xFFFFFFFF
        sequence = self._open[number] = CarriedSequence(self, number)
        try:
            if state is not None:
                await sequence.go_on(state)
            yield sequence
        finally:
            await sequence.aclose()

    def send(self, frame: bytes | str) -> None:
        """Send a frame with the others of this turn. For its sequences; raises ServerError if it is over."""
        if self._error is not None:
            raise self._error
        self._frames.append(frame)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all())

    async def _send_all(self) -> None:
        try:
            while self._frames:
                frames, self._frames = self._frames, []
                together: list[bytes] = []
                for frame in frames:
                    if isinstance(frame, bytes):
                        together.append(frame)
                        continue
                    if together:
                        await self._socket.send(b"".join(together))
                        together = []
                    await self._socket.send(frame)
                if together:
                    await self._socket.send(b"".join(together))
        except ConnectionClosed:
            pass  # `_read` tells it to all who wait
        finally:
            self._sending = None

    async def _read(self) -> None:
        try:
            async for message in self._socket:
                if isinstance(message, str):
                    said = json.loads(message)
                    answer = said.get("answer", said)
                    self._settle(said["sequence"], answer, is_last=said.get("end", "error" in said))
                else:
                    self._read_frames(message)
        except ConnectionClosed:
            pass
        self._error = _closing_error(self._socket)
        for sequence in tuple(self._open.values()):
            sequence.ended(self._error)

    def _read_frames(self, message: bytes) -> None:
        at = 0
        while at < len(message):
            number, flags, kind, _, size = _HEAD.unpack_from(message, at)
            at += _HEAD.size + size
            content, answer = message[at - size : at], dict[str, Any]()
            if kind == _VALUES and self._form is not None:
                answer = {self._form.name: self._form.read(content)}
            elif kind == _STATE:
                answer = {"state": content}
            self._settle(number, answer, is_last=bool(flags & _END))

    def _settle(self, number: int, answer: dict[str, Any], *, is_last: bool) -> None:
        sequence = self._open.get(number)
        if sequence is not None:  # otherwise nobody waits any more
            sequence.settle(answer, is_last=is_last)

    def forget(self, number: int) -> None:
        """A sequence has ended: nothing comes for it any more that anybody waits for."""
        self._open.pop(number, None)

    async def aclose(self) -> None:
        """End all sequences and give up unanswered chunks. A second call has no effect."""
        await self._socket.close()
        await self._reading


@final
class CarriedSequence:
    """One sequence of a SequencesConnection: chunks in, answers out, in order. See `OpenSequence` for its methods."""

    def __init__(self, connection: SequencesConnection, number: int) -> None:
        self._connection = connection
        self._number = number
        self._waiting: deque[asyncio.Future[dict[str, Any]]] = deque()
        self._places = asyncio.Semaphore(connection.ahead)
        self._flags = _BEGIN
        self._is_finished = False
        self._error: ServerError | None = None

    async def submit(self, chunk: Any, *, parameters: Mapping[str, Parameter] | None = None) -> dict[str, Any]:
        """Return a chunk's answer, as a dict of the outputs by name. As OpenSequence.submit.

        An error of the server is this sequence's alone, and its last answer.
        """
        return await self._ask(0, self._connection.chunks.raw(chunk, parameters))

    async def finish(
        self, chunk: Any = None, *, parameters: Mapping[str, Parameter] | None = None
    ) -> dict[str, Any] | None:
        """Return the answer to the last chunk, or None; the sequence ends with it. As OpenSequence.finish."""
        content = None if chunk is None else self._connection.chunks.raw(chunk, parameters)
        answer = await self._ask(_END, content)
        return None if not answer.keys() - {"sequence", "end"} else answer

    async def reset(self) -> None:
        """Have the chunks that are submitted from now on begin from no state."""
        await self._ask(_RESET, None)

    async def state(self) -> bytes:
        """Return the state after all chunks so far: `open(state=...)` goes on from it, at any server."""
        if self._flags:
            await self._ask(0, None)  # it begins with a frame of its own
        state = (await self._ask(0, b"", _STATE))["state"]
        return base64.b64decode(state) if isinstance(state, str) else state

    async def go_on(self, state: bytes) -> None:
        """Begin from a state, before the first chunk; see `SequencesConnection.open`."""
        await self._ask(0, state, _STATE)

    async def _ask(self, flags: int, content: bytes | dict[str, Any] | None, kind: int = _VALUES) -> dict[str, Any]:
        """Send a frame and return its answer. content: None for nothing."""
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        async with self._places:
            if self._error is not None:
                raise self._error
            if self._is_finished:
                raise ServerError("the sequence has ended: it was finished")
            flags |= self._flags
            if isinstance(content, dict):
                self._connection.send(json.dumps({"sequence": self._number, **_marks(flags), "chunk": content}))
            else:
                kind = _NOTHING if content is None else kind
                self._connection.send(_HEAD.pack(self._number, flags, kind, 0, len(content or b"")) + (content or b""))
            self._flags, self._is_finished = 0, bool(flags & _END)
            self._waiting.append(answer)
            return await answer

    def settle(self, answer: dict[str, Any], *, is_last: bool) -> None:
        """Take the answer to the first frame that has none."""
        if self._waiting:
            _settle(self._waiting.popleft(), answer)
        if is_last:
            said = f"the sequence has ended: {answer['error']}" if "error" in answer else "the sequence has ended"
            self.ended(ServerError(said))

    def ended(self, error: ServerError) -> None:
        """Fail those who wait, and all later ones."""
        self._error = error
        self._connection.forget(self._number)
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_exception(error)

    async def aclose(self) -> None:
        """End the sequence and give up unanswered chunks. A second call has no effect."""
        if self._error is None:
            with suppress(ServerError):
                if not self._flags:
                    self._connection.send(_HEAD.pack(self._number, _GIVE_UP, _NOTHING, 0, 0))
            self.ended(ServerError("the sequence has ended: it was closed"))


def _marks(flags: int) -> dict[str, bool]:
    """Return flags as JSON has them."""
    return {name: True for name, flag in (("begin", _BEGIN), ("end", _END), ("reset", _RESET)) if flags & flag}
