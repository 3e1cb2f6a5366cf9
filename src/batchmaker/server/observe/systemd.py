"""What systemd hears of a service whose unit says Type=notify: see sd_notify(3)."""

from __future__ import annotations

import contextlib
import os
import socket


def tell_systemd(*states: str) -> None:
    """Send these states, such as "READY=1", where $NOTIFY_SOCKET says; nothing without it. Never blocks or raises."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return
    if address.startswith("@"):  # a name that is no file
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
        connection.setblocking(False)
        connection.connect(address)
        connection.send("\n".join(states).encode())
