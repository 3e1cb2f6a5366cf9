"""What systemd is told, over a socket of the kind that it has."""

from __future__ import annotations

import signal
import socket

import pytest
from server_process import LIMIT_S

from batchmaker.server.observe.systemd import tell_systemd


@pytest.fixture
def systemd(tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(LIMIT_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listener


def test_states_arrive_as_one_message(systemd):
    tell_systemd("RELOADING=1", "MONOTONIC_USEC=5")
    assert systemd.recv(100) == b"RELOADING=1\nMONOTONIC_USEC=5"


def test_a_socket_without_a_file_is_reached_too(monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("")  # Linux gives it a name
        listener.settimeout(LIMIT_S)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + listener.getsockname()[1:].decode())
        tell_systemd("READY=1")
        assert listener.recv(100) == b"READY=1"


@pytest.mark.parametrize("address", ["", "relative", "/nobody/listens/here"])
def test_where_nobody_listens_nothing_happens(address, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    tell_systemd("READY=1")


@pytest.mark.slow
def test_a_server_tells_when_it_takes_requests_reads_its_settings_and_ends(systemd, serve):
    server = serve("lstm:hidden=4,vocabulary_size=9")
    assert systemd.recv(100) == b"READY=1"
    server.process.send_signal(signal.SIGHUP)
    assert systemd.recv(100).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
    assert systemd.recv(100) == b"READY=1"
    assert server.terminate() == 0
    assert systemd.recv(100) == b"STOPPING=1"
