"""A server in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping
from typing import final

import uvloop

from batchmaker.errors import StoppedError
from batchmaker.server.access.auth import KeyRing
from batchmaker.server.config import Config, check_config
from batchmaker.server.listening import bind
from batchmaker.server.run import Sources, Stop, connections_of, serve_on
from batchmaker.server.service.repository import Repository


@final
class ServerThread:
    """A server in a process that does other things too, such as a replica of a fleet. It handles no signals.

    keys: API keys by the holder's name, in place of those that `config` names; they have no rates.
    """

    def __init__(self, config: Config, keys: Mapping[str, str]) -> None:
        self._config = config
        self._keys = dict(keys)
        self._thread = threading.Thread(target=self._run, name="batchmaker-server", daemon=True)
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: Stop | None = None
        self._error: BaseException | None = None
        self._finished = False
        self.addresses: list[str] = []

    def start(self) -> list[str]:
        """Return the server's addresses when requests are taken. Raises what the start raises, such as OptionError."""
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error
        if not self.addresses:
            raise StoppedError("the server was stopped before it was ready")
        return self.addresses

    def stop(self) -> None:
        """End in order: refuse new requests and finish those accepted; called again, end at once. Any thread may."""
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended: its loop is closed
                loop.call_soon_threadsafe(stop.begin)

    def join(self) -> bool:
        """Wait for the end; return whether all accepted requests were finished."""
        self._thread.join()
        return self._finished

    def _run(self) -> None:
        try:
            check_config(self._config)
            config = self._config
            repository = Repository(config.entries(), config.limits, config.versions, config.trace_steps)
            sources = Sources(connections_of(config))
            with (
                contextlib.closing(bind(config, config.port)) as listener,
                asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
            ):
                keys, listeners = KeyRing(self._keys), (listener, None)
                work = serve_on(config, repository, keys, listeners, sources, self._ready, self._control)
                self._finished = runner.run(work)
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()

    def _control(self, stop: Stop) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), stop

    def _ready(self, addresses: list[str], models: list[str]) -> None:
        self.addresses = addresses
        self._started.set()
