"""Reads and writes the sockets of thousands of connections together: two calls for a turn of the event loop.

An event loop reads each socket for itself, and takes the interpreter's lock anew before it hands the data over. While
an engine's thread computes, each time is a wait, so a frame that comes by itself would cost its loop a turn of the
engine's. Here a turn takes the lock a few times, however many sockets have data.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled_unlocked, external, is_compiled

SOCKETS: Final = 128
PIECE: Final = 16_384
"""Most sockets that are read in one turn, and most bytes of each."""

_LARGE: Final = 65_536
"""More bytes than this are left to the event loop, which sees how fast the client reads."""

_LOG = logging.getLogger("batchmaker.server")

_SEND_FLAGS: Final = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)
_RECEIVE_FLAGS: Final = int(socket.MSG_DONTWAIT)

# ssize_t recv(int, void *, size_t, int), and send alike: see their pages in section 2 of the Linux manual
_recv = external("recv", "intp(intc, intp, intp, intc)")
_send = external("send", "intp(intc, intp, intp, intc)")


@compiled_unlocked
def receive(files: NDArray[np.int64], room: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Read what has come at sockets into the rows of `room`, and return how many bytes of each: 0 at the end of its
    data, -1 if it cannot be read now. files: their descriptors, no more than there are rows."""
    sizes = np.empty(len(files), np.int64)
    for i in range(len(files)):
        sizes[i] = _recv(files[i], room.ctypes.data + i * room.shape[1], room.shape[1], _RECEIVE_FLAGS)
    return sizes


@compiled_unlocked
def send(files: NDArray[np.int64], ends: NDArray[np.int64], data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Write to sockets, and return how many bytes of each were taken; -1 for none. data: that of all, end to end."""
    sizes, begin = np.empty(len(files), np.int64), 0
    for i in range(len(files)):
        sizes[i] = _send(files[i], data.ctypes.data + begin, ends[i] - begin, _SEND_FLAGS)
        begin = ends[i]
    return sizes


@final
class SocketPool:
    """Transports of one event loop that are read and written together. Used from that loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._members: dict[int, PooledTransport] = {}
        self._room = np.empty((SOCKETS, PIECE), np.uint8)
        self._written: dict[PooledTransport, list[bytes]] = {}
        self._is_possible = hasattr(select, "epoll") and is_compiled(receive)
        if self._is_possible:
            self._epoll = select.epoll()
            none = np.empty(0, np.int64)
            receive(none, self._room)  # compiled now, and not while frames come
            send(none, none, self._room[0])

    def pooled(self, transport: asyncio.Transport) -> asyncio.Transport:
        """Return a transport to use in place of this one: it itself if there is more to it than a socket, such as TLS,
        or if this system lacks what it takes."""
        stream = transport.get_extra_info("socket")
        if not self._is_possible or stream is None or transport.get_extra_info("sslcontext") is not None:
            return transport
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._epoll.fileno(), self._read)
        return PooledTransport(self, transport, stream.fileno())

    # --- for transports ----------------------------------------------------------------------------------------------

    def enter(self, member: PooledTransport) -> None:
        """Read this transport's socket from now on."""
        self._members[member.file] = member
        self._epoll.register(member.file, select.EPOLLIN)

    def leave(self, member: PooledTransport) -> None:
        """Read its socket no more."""
        if self._members.get(member.file) is member:
            del self._members[member.file]
            with contextlib.suppress(OSError):  # the system has closed it
                self._epoll.unregister(member.file)

    def write(self, member: PooledTransport, data: bytes) -> None:
        """Write at the end of this turn."""
        if not self._written:
            assert self._loop is not None
            self._loop.call_soon(self.flush)
        self._written.setdefault(member, []).append(data)

    def forget(self, member: PooledTransport) -> None:
        """Do not write what was to be written."""
        self._written.pop(member, None)

    def flush(self) -> None:
        """Write what was to be written at the end of this turn."""
        written, self._written = self._written, {}
        members: list[PooledTransport] = []
        datas: list[bytes] = []
        for member, parts in written.items():
            if member.is_closing():
                continue
            data = parts[0] if len(parts) == 1 else b"".join(parts)
            if member.is_plain and len(data) <= _LARGE:
                members.append(member)
                datas.append(data)
            else:
                member.transport.write(data)
        if not members:
            return
        files = np.array([member.file for member in members], np.int64)
        ends = np.cumsum([len(data) for data in datas])
        sizes = send(files, ends, np.frombuffer(b"".join(datas), np.uint8)).tolist()
        for member, data, size in zip(members, datas, sizes, strict=True):
            if size < len(data):
                member.transport.write(data[max(size, 0) :])

    # --- for the event loop ------------------------------------------------------------------------------------------

    def _read(self) -> None:
        files = [file for file, _ in self._epoll.poll(0, SOCKETS)]
        sizes = receive(np.array(files, np.int64), self._room).tolist()
        for place, (file, size) in enumerate(zip(files, sizes, strict=True)):
            member = self._members.get(file)
            if member is None or member.protocol is None:
                continue  # it was closed a moment ago
            if size <= 0:
                member.give_back()
                continue
            try:
                member.protocol.data_received(self._room[place, :size].tobytes())
            except Exception:  # what others have sent has been read, and is handed over all the same
                _LOG.exception("a connection failed")
                member.abort()


@final
class PooledTransport(asyncio.Transport):
    """A transport of a SocketPool. It writes at the end of a turn; all else is done by the event loop's own transport.

    transport: that, which must not be used by itself. file: the descriptor of its socket. protocol: gets the data.
    """

    __slots__ = ("_is_read_here", "_pool", "file", "protocol", "transport")

    def __init__(self, pool: SocketPool, transport: asyncio.Transport, file: int) -> None:
        self._pool = pool
        self.transport = transport
        self.file = file
        self.protocol: asyncio.Protocol | None = None
        self._is_read_here = False

    @property
    def is_plain(self) -> bool:
        """Whether nothing that was written before has to go first."""
        return not self.transport.get_write_buffer_size()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Give the data to this from now on."""
        assert isinstance(protocol, asyncio.Protocol)
        self.transport.set_protocol(protocol)
        self.protocol = protocol
        self.transport.pause_reading()
        self._is_read_here = True
        self._pool.enter(self)

    def give_back(self) -> None:
        """Have the event loop read: there is an end or an error, and it knows what to do."""
        self._pool.leave(self)
        self._is_read_here = False
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def write(self, data: Any) -> None:
        self._pool.write(self, data)

    def pause_reading(self) -> None:
        if self._is_read_here:
            self._pool.leave(self)
        else:
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self._is_read_here:
            self._pool.enter(self)
        else:
            self.transport.resume_reading()

    def is_closing(self) -> bool:
        return self.transport.is_closing()

    def close(self) -> None:
        self._pool.leave(self)
        self._pool.flush()
        self.transport.close()

    def abort(self) -> None:
        self._pool.leave(self)
        self._pool.forget(self)
        self.transport.abort()
