"""Hands the sequences of a replica that leaves over to others: their states go there, and clients notice nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import Any, Final
from urllib.parse import quote

from batchmaker.fleet.balancer import Balancer, NamedSequence, Replica
from batchmaker.fleet.links import Link
from batchmaker.fleet.sockets import Relay
from batchmaker.fleet.upstream import NoAnswerError, NotDoneError
from batchmaker.server.access.sender import HEADER as SENDER
from batchmaker.server.faults import ServiceError
from batchmaker.server.formats.messages import Parameter
from batchmaker.server.http.shared_connection import MOST_BODY_BYTES

_LOG = logging.getLogger("batchmaker.fleet")
_AT_ONCE: Final = 16
"""Sequences that are handed over at the same time."""


async def hand_over(balancer: Balancer, replica: Replica) -> int:
    """Move every sequence to a replica that stays, each once its chunks in progress are answered.

    Returns how many were moved. A sequence stays where it is if no other replica takes it: it serves another model or
    other weights, its state cannot be moved, or two clients claim the name. So do all sequences of its connection.
    """
    room, moved = asyncio.Semaphore(_AT_ONCE), 0

    async def move(one: NamedSequence) -> None:
        nonlocal moved
        async with room, one.at.lock:
            while balancer.is_open(one) and one.at.may_move and await _move(balancer, one):
                moved += 1

    async def move_socket(relay: Relay) -> None:
        nonlocal moved
        async with room:
            while relay.replica.state == "draining" and (count := await relay.move()) is not None:
                moved += count

    link: Link = replica.link
    async with asyncio.TaskGroup() as tasks:
        for one in balancer.sequences_at(replica):
            tasks.create_task(move(one))
        for relay in tuple(link.relays):
            tasks.create_task(move_socket(relay))
    if moved:
        _LOG.info("sequences were handed over", extra={"replica": replica.number, "sequences": moved})
    return moved


async def _move(balancer: Balancer, one: NamedSequence) -> bool:
    """Let a sequence go on at another replica. Returns False if it stays. The caller has its lock."""
    old = one.at.replica
    try:
        new = balancer.connect()
    except ServiceError:
        return False
    try:
        state = (await _ask(old, one, sequence_state=True)).get("parameters", {})["sequence_state"]
        await _ask(new, one, sequence_start=True, sequence_state=state, priority=one.at.priority)
    except BaseException as error:  # cancelled, too: the time for leaving is over
        balancer.disconnect(new)
        if not isinstance(error, NotDoneError | NoAnswerError | ValueError | KeyError):  # ValueError: what is no JSON
            raise
        _LOG.warning("a sequence stays at a replica that leaves", extra={"replica": old.number, "error": str(error)})
        return False
    balancer.move(one, new)
    with contextlib.suppress(NotDoneError, NoAnswerError):  # it may have ended there by itself, or with its replica
        await _ask(old, one, sequence_end=True)
    return True


async def _ask(replica: Replica, one: NamedSequence, **parameters: Parameter) -> dict[str, Any]:
    """Ask a replica something about a sequence, in the name of its client. Returns the answer."""
    sender, model, version, link = one.at.sender, one.model, one.version, replica.link
    assert isinstance(link, Link)
    path = f"/v2/models/{quote(model, safe='')}" + ("" if version is None else f"/versions/{quote(version, safe='')}")
    controls = {name: value for name, value in parameters.items() if value is not None}
    body = json.dumps({"parameters": {"sequence_id": one.name, **controls}}).encode()
    target = f"{path}/generate".encode()
    headers = [
        (b"x-api-key", link.key_of(sender.holder).encode("latin-1")),
        (SENDER.encode(), sender.forwarded.encode("latin-1")),
        (b"content-type", b"application/json"),
    ]
    if len(body) <= MOST_BODY_BYTES:
        answer = await link.shared.call(target, headers, body)
    else:
        head = b"POST %s HTTP/1.1\r\nhost: replica\r\ncontent-length: %d\r\n" % (target, len(body))
        answer = await link.http.call(head + b"".join(b"%s: %s\r\n" % pair for pair in headers) + b"\r\n", body)
    said: dict[str, Any] = json.loads(answer.body or b"{}")
    if answer.status >= 400:
        raise NotDoneError(said.get("error", answer.status))
    return said
