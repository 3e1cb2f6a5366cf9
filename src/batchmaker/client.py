"""Values of a server's answer as they are computed, from asyncio.

For everything else there is `tritonclient`; over HTTP it cannot stream. Needs httpx and, of this package, nothing that
needs torch: `pip install 'batchmaker[client]'`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any, Final, Self, final
from urllib.parse import quote

import httpx

from batchmaker.errors import BatchmakerError, OptionError

Parameter = bool | int | float | str
"""What a parameter of a request may be, such as `deadline_ms`, `priority` or `sequence_id`."""

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
        if not address.startswith(("http://", "https://")):
            raise OptionError(
                f"address {address!r} must begin with http:// or https://: give http://localhost:8000, for example"
            )
        headers = {} if key is None else {"X-API-Key": key}
        # No limit on reading: how long a value may take is for the request's own deadline to say
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(
            base_url=address, headers=headers, timeout=timeout, limits=limits, transport=transport
        )

    async def stream(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: str | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield each value as soon as it is there, as a dict of the outputs by name.

        inputs: numbers, strings, or lists of them, by name. parameters: as in the server's documentation. Leaving the
        iteration closes the connection, by which the server gives the request up; use `contextlib.aclosing` to be sure
        when. Raises ServerError: before the first value with a status, after it without one.
        """
        path = f"/v2/models/{quote(model, safe='')}"
        if version is not None:
            path += f"/versions/{quote(version, safe='')}"
        body = {**inputs, "parameters": dict(parameters)} if parameters else dict(inputs)
        try:
            async with self._http.stream("POST", f"{path}/generate_stream", json=body) as answer:
                if answer.status_code != httpx.codes.OK:
                    raise _refusal(answer, await answer.aread())
                async with aclosing(_events(answer.aiter_bytes())) as events:
                    async for event in events:
                        if "error" in event:
                            raise ServerError(event["error"])
                        yield {name: value for name, value in event.items() if name not in _META}
        except httpx.HTTPError as error:
            raise ServerError(f"the server cannot be reached, or has gone: {error or type(error).__name__}") from error

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


async def _events(received: AsyncIterator[bytes]) -> AsyncGenerator[dict[str, Any], None]:
    """Yield what each `data:` line of a stream of events holds. Bytes may be cut anywhere."""
    rest = b""
    async for some in received:
        *whole, rest = (rest + some).split(b"\n\n")
        for event in whole:
            yield json.loads(event.removeprefix(b"data: "))


def _refusal(answer: httpx.Response, body: bytes) -> ServerError:
    """Return the error that an answer which is none tells of, whoever has sent it."""
    try:
        said = str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        said = f"the answer is {answer.status_code} {answer.reason_phrase}, and not from batchmaker"
    after = answer.headers.get("retry-after", "")
    return ServerError(said, answer.status_code, float(after) if after.isdigit() else None)
