"""Applies changed settings while requests run, at SIGHUP."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from typing import Final, final

import msgspec

from batchmaker.errors import BatchmakerError
from batchmaker.server.access.auth import KeyRing
from batchmaker.server.config import Config, check_config
from batchmaker.server.observe import logs
from batchmaker.server.observe.systemd import tell_systemd
from batchmaker.server.service.repository import Repository

_LOG = logging.getLogger("batchmaker.server")

_TAKEN_OVER: Final = frozenset(
    (
        "auth.keys",
        "auth.rate",
        "auth.burst",
        "auth.control_keys",
        "log.level",
        "models",
        "tls.cert",
        "tls.key",
        "versions",
    )
)


@final
class Reload:
    """Reads the settings again and applies keys, the certificate, the log level and models.

    What is wrong in them is logged, and everything stays as it was. What else has changed waits for the next start,
    which the log says. successful: whether all was taken over when settings were last read. taken_over_unix_s: when
    that last was so, in seconds since 1970.
    """

    def __init__(self, config: Config, read: Callable[[], Config], keys: KeyRing, repository: Repository) -> None:
        """config: the settings at the start. read: reads them again."""
        self._config = config
        self._read = read
        self._keys = keys
        self._repository = repository
        self._contexts: list[ssl.SSLContext] = []
        self._running: asyncio.Task[None] | None = None
        self._again = False
        self.successful = True
        self.taken_over_unix_s = time.time()

    def with_certificate(self, context: ssl.SSLContext | None) -> None:
        """Also reload this context's certificate; later connections use it."""
        if context is not None:
            self._contexts.append(context)

    def begin(self) -> None:
        """Begin a reload. If one is in progress, another follows."""
        if self._running is None:
            self._running = asyncio.ensure_future(self._reload())
            self._running.add_done_callback(self._ended)
        else:
            self._again = True

    def _ended(self, _: object) -> None:
        self._running = None
        if self._again:
            self._again = False
            self.begin()

    async def _reload(self) -> None:
        tell_systemd("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")
        try:
            self.successful = await self._take_over()
        except (BatchmakerError, OSError) as error:
            self.successful = False
            _LOG.error("not reloaded", extra={"error": str(error)})
        except Exception:
            self.successful = False
            _LOG.exception("not reloaded")
        if self.successful:
            self.taken_over_unix_s = time.time()
        tell_systemd("READY=1")

    async def _take_over(self) -> bool:
        """Return whether every model is what its source has now."""
        config = await asyncio.to_thread(self._read)
        check_config(config)
        entries, keys = config.entries(), config.auth.keys_and_rates()
        contexts = [] if config.tls.cert is None else self._contexts
        if contexts:  # tried first where it does no harm: a context whose key does not fit is of no more use
            use_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), config)
        self._keys.replace(*keys)
        for context in contexts:
            use_certificate(context, config)
        logs.set_level(config.log.level)
        waiting = waiting_settings(self._config, config)
        all_loaded = await self._repository.reload(entries, config.versions)
        _LOG.info("reloaded", extra={"waits_for_next_start": waiting} if waiting else {})
        return all_loaded


def use_certificate(context: ssl.SSLContext, config: Config) -> None:
    """Read the certificate of these settings, which must have one, into a context. Raises OSError."""
    assert config.tls.cert is not None
    context.load_cert_chain(config.tls.cert, config.tls.key)


def waiting_settings(started: Config, now: Config) -> list[str]:
    """Return the names of changed settings that need a restart, such as "limits.max_nodes"."""
    names: list[str] = []
    for name in Config.__struct_fields__:
        old, new = getattr(started, name), getattr(now, name)
        if isinstance(old, msgspec.Struct):
            inner = [field for field in old.__struct_fields__ if getattr(old, field) != getattr(new, field)]
            names += [f"{name}.{field}" for field in inner]
        elif old != new:
            names.append(name)
    waiting = [name for name in names if name not in _TAKEN_OVER]
    return waiting + ["tls"] * ((started.tls.cert is None) != (now.tls.cert is None))
