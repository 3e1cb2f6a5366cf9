"""The served models: loaded and unloaded while requests run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, final

from batchmaker.errors import RAISED_BY_USERS, BatchmakerError, ModelError, OptionError, said_by
from batchmaker.model.model import Model
from batchmaker.saved.sources import Source, Versions
from batchmaker.server.faults import FaultKind, ServiceError, fault_of
from batchmaker.server.limits import Limits
from batchmaker.server.service.engine_port import EngineOptions
from batchmaker.server.service.memory import free_memory
from batchmaker.server.service.served_model import ServedModel, StopCause

_LOG = logging.getLogger("batchmaker.server")

_LOOK_S: Final = 1.0
_AGAIN_S: Final = 60.0
"""Seconds between two checks for hung models, and between two replacements of one model."""

VersionPolicy = Literal["latest", "all"]
State = Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A source of models and the options of their engines."""

    source: Source
    options: EngineOptions = field(default_factory=EngineOptions)


@dataclass(frozen=True, slots=True)
class IndexLine:
    """One version of one model in the repository's index."""

    name: str
    version: str
    state: State
    reason: str


@dataclass(frozen=True, slots=True)
class _FoundModel:
    """A model in a source. chosen: the versions to serve."""

    chosen: Versions
    versions: Versions
    options: EngineOptions

    @property
    def stamp(self) -> tuple[Hashable, ...]:
        """Differs if the models to serve differ."""
        return self.options, *((number, version.stamp) for number, version in sorted(self.chosen.items()))


@dataclass(frozen=True, slots=True)
class _Scan:
    """What is in all sources now. clashes: names that occur twice, which do not count. unread: why sources are missing.

    What an unread source had is neither here nor gone: nobody knows.
    """

    models: dict[str, _FoundModel]
    clashes: set[str]
    unread: list[str]


@final
class Repository:
    """Models by name and version. One engine for each loaded version."""

    def __init__(
        self, entries: Sequence[Entry], limits: Limits, versions: VersionPolicy = "latest", trace_steps: int = 20_000
    ) -> None:
        self._entries = tuple(entries)
        self._limits = limits
        self._policy: VersionPolicy = versions
        self._trace_steps = trace_steps
        self._served: dict[str, dict[str, ServedModel]] = {}
        self._loaded: dict[str, tuple[Hashable, ...]] = {}  # the stamps of the models in `_served`
        self._states: dict[tuple[str, str], tuple[State, str]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    def _scan(self) -> _Scan:
        """Return what is in the sources. One that cannot be read, because it is gone, leaves the others as they are."""
        by_name: dict[str, _FoundModel] = {}
        clashes: set[str] = set()
        unread: list[str] = []
        for entry in self._entries:
            try:
                models = entry.source.scan()
            except OSError as error:
                unread.append(str(error))
                _LOG.warning("models cannot be read", extra={"error": str(error)})
                continue
            for name, versions in models.items():
                if name in by_name:
                    clashes.add(name)
                elif versions:
                    by_name[name] = _FoundModel(self._chosen(versions), versions, entry.options)
        return _Scan({name: one for name, one in by_name.items() if name not in clashes}, clashes, unread)

    def _chosen(self, versions: Versions) -> Versions:
        newest = max(versions, key=int)
        return versions if self._policy == "all" else {newest: versions[newest]}

    async def load_all(self) -> None:
        """Load every model. Raises the error of the first that fails, OptionError if two have one name."""
        scan = await asyncio.to_thread(self._scan)
        if scan.clashes:
            raise OptionError(_clash(min(scan.clashes)))
        if scan.unread:
            raise OptionError(f"models cannot be read: {scan.unread[0]}")
        for name, one in scan.models.items():
            await self._load(name, one)

    async def load(self, name: str) -> None:
        """Load a model again: its newest version, or all. The old one serves until then and is then drained."""
        scan = await asyncio.to_thread(self._scan)
        if name in scan.clashes:
            raise ServiceError(FaultKind.INVALID, _clash(name))
        if name not in scan.models:
            raise ServiceError(FaultKind.NOT_FOUND, f"there is no model {name[:128]!r} in the repository")
        try:
            await self._load(name, scan.models[name])
        except BatchmakerError as error:
            _LOG.error("model cannot be loaded", extra={"model": name, "error": str(error)})
            raise ServiceError(
                FaultKind.INTERNAL, f"model {name!r} cannot be loaded; the server's log says why"
            ) from error

    async def reload(self, entries: Sequence[Entry], versions: VersionPolicy) -> bool:
        """Have these sources from now on: load what is new or has changed, unload what is gone; the rest goes on.

        What cannot be loaded is logged, and what was served in its place goes on; while a source cannot be read, all
        that is served does. Returns whether all could be.
        """
        self._entries, self._policy = tuple(entries), versions
        scan = await asyncio.to_thread(self._scan)
        all_loaded = not scan.clashes and not scan.unread
        for name in scan.clashes:
            _LOG.error("model cannot be loaded", extra={"model": name, "error": _clash(name)})
        gone = [name for name in self._served if self._served[name] and name not in {*scan.models, *scan.clashes}]
        for name in gone if not scan.unread else ():
            await self.unload(name)
        for name, one in scan.models.items():
            if self._served.get(name) and self._loaded.get(name) == one.stamp:
                continue
            try:
                await self._load(name, one)
            except Exception as error:  # of a model's own code too
                all_loaded = False
                _LOG.error("model cannot be loaded", extra={"model": name, "error": str(error)})
        return all_loaded

    async def _load(self, name: str, model: _FoundModel) -> None:
        chosen, options = model.chosen, model.options
        async with self._locks.setdefault(name, asyncio.Lock()):
            fresh: dict[str, ServedModel] = {}
            for version, source in chosen.items():
                if version not in self._served.get(name, {}):
                    self._states[name, version] = ("LOADING", "")
                try:
                    fresh[version] = await asyncio.to_thread(self._make, name, version, source.make, options)
                except Exception as error:
                    if version not in self._served.get(name, {}):
                        self._states[name, version] = ("UNAVAILABLE", str(fault_of(error)))
                    await _close_all(fresh, 0.0, StopCause.UNLOADED)
                    raise
            old, self._served[name] = self._served.get(name, {}), fresh
            self._loaded[name] = model.stamp
            for version in old:
                self._states[name, version] = ("UNAVAILABLE", "unloaded")
            for version in fresh:
                self._states[name, version] = ("READY", "")
                _LOG.info("model loaded", extra={"model": name, "version": version})
            await _close_all(old, self._limits.drain_seconds, StopCause.REPLACED)
            ended = [weakref.ref(model) for model in old.values()]
            del old
        if ended:
            await free_memory(ended)

    def _make(self, name: str, version: str, make: Callable[[], Model], options: EngineOptions) -> ServedModel:
        """Load a model in a thread. An exception that would end the waiting event loop becomes a ModelError."""
        try:
            return ServedModel(name, version, make(), options, self._limits, self._trace_steps)
        except Exception:
            raise
        except RAISED_BY_USERS as error:
            raise ModelError(f"model {name!r}: its code raised {said_by(error)} while it was loaded") from error

    async def replace_hung(self) -> None:
        """Load models again whose engines hang or have failed, until cancelled; each at most once a minute.

        The old engine gets its time to drain; then its accepted requests are answered with an error.
        """
        tried_s: dict[str, float] = {}
        while True:
            await asyncio.sleep(_LOOK_S)
            for model in self.models():
                if model.responds or time.monotonic() - tried_s.get(model.name, -_AGAIN_S) < _AGAIN_S:
                    continue
                tried_s[model.name] = time.monotonic()
                _LOG.error("model is replaced: its engine hangs or has failed", extra={"model": model.name})
                with contextlib.suppress(ServiceError):  # logged there
                    await self.load(model.name)

    async def unload(self, name: str) -> None:
        """Take no more requests for a model, finish the accepted ones and end its engines. NOT_FOUND if it has none."""
        if not self._served.get(name):
            raise ServiceError(FaultKind.NOT_FOUND, f"model {name[:128]!r} is not loaded")
        async with self._locks[name]:
            old = self._served.pop(name, {})
            for version in old:
                self._states[name, version] = ("UNLOADING", "")
            await _close_all(old, self._limits.drain_seconds, StopCause.UNLOADED)
            for version in old:
                self._states[name, version] = ("UNAVAILABLE", "unloaded")
                _LOG.info("model unloaded", extra={"model": name, "version": version})
            ended = [weakref.ref(model) for model in old.values()]
            del old
        await free_memory(ended)

    def get(self, name: str, version: str | None = None) -> ServedModel:
        """Return a loaded model: the named version, or the newest. NOT_FOUND if there is none."""
        versions = self._served.get(name)
        if not versions:
            raise ServiceError(
                FaultKind.NOT_FOUND, f"there is no model {name[:128]!r}; POST /v2/repository/index lists them"
            )
        if not version:
            return versions[max(versions, key=int)]
        if version not in versions:
            loaded = ", ".join(sorted(versions, key=int))
            raise ServiceError(FaultKind.NOT_FOUND, f"model {name!r} has no version {version[:32]!r}; loaded: {loaded}")
        return versions[version]

    def versions(self, name: str) -> tuple[str, ...]:
        """Return the loaded versions of a model, oldest first."""
        return tuple(sorted(self._served.get(name, {}), key=int))

    def models(self) -> list[ServedModel]:
        """Return all loaded models."""
        return [model for versions in self._served.values() for model in versions.values()]

    async def index(self, *, ready_only: bool = False) -> list[IndexLine]:
        """Return the loaded models, and those that could be loaded."""
        lines = {key: IndexLine(*key, *state) for key, state in self._states.items()}
        if not ready_only:
            scan = await asyncio.to_thread(self._scan)
            for name, one in scan.models.items():
                for version in one.versions:
                    lines.setdefault((name, version), IndexLine(name, version, "UNAVAILABLE", "not loaded"))
            for name in scan.clashes:
                lines.setdefault((name, "1"), IndexLine(name, "1", "UNAVAILABLE", _clash(name)))
        chosen = (line for line in lines.values() if not ready_only or line.state == "READY")
        return sorted(chosen, key=lambda line: (line.name, int(line.version)))

    @property
    def in_flight(self) -> int:
        """Requests accepted and not answered, of all models."""
        return sum(model.statistics.in_flight for model in self.models())

    @property
    def ready(self) -> bool:
        """Whether there is a loaded model and every loaded model takes requests."""
        models = self.models()
        return bool(models) and all(model.ready for model in models)

    async def close(self, within_s: float) -> bool:
        """Finish accepted requests, for `within_s` at most, and end all engines: the server stops.

        Returns whether all were finished.
        """
        models = {str(number): model for number, model in enumerate(self.models())}
        return await _close_all(models, within_s, StopCause.SERVER)


def _clash(name: str) -> str:
    return f"two models are named {name!r}; give one of them another name as NAME=MODEL"


async def _close_all(models: Mapping[str, ServedModel], within_s: float, cause: StopCause) -> bool:
    for model in models.values():
        model.refuse(cause)
    return all(await asyncio.gather(*(model.close(within_s, cause) for model in models.values())))
