"""The models that are served: loaded and unloaded while requests run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, final

from batchmaker.cells.model import Model
from batchmaker.errors import RAISED_BY_USERS, BatchmakerError, ModelError, OptionError, said_by
from batchmaker.server.engine_port import EngineOptions
from batchmaker.server.faults import FaultKind, ServiceError, fault_of
from batchmaker.server.limits import Limits
from batchmaker.server.served import ServedModel
from batchmaker.server.sources import Source, Versions

_LOG = logging.getLogger("batchmaker.server")

VersionPolicy = Literal["latest", "all"]
State = Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A source of models and how their engines are made."""

    source: Source
    options: EngineOptions = field(default_factory=EngineOptions)


@dataclass(frozen=True, slots=True)
class IndexLine:
    """One version of one model in the repository's index."""

    name: str
    version: str
    state: State
    reason: str


@final
class Repository:
    """Models by name and version. One engine for each version that is loaded."""

    def __init__(
        self, entries: Sequence[Entry], limits: Limits, versions: VersionPolicy = "latest", trace_steps: int = 20_000
    ) -> None:
        self._entries = tuple(entries)
        self._limits = limits
        self._policy: VersionPolicy = versions
        self._trace_steps = trace_steps
        self._served: dict[str, dict[str, ServedModel]] = {}
        self._states: dict[tuple[str, str], tuple[State, str]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    def _scan(self) -> dict[str, tuple[Versions, EngineOptions]]:
        """Return what all sources have now. OptionError if two have a model of one name."""
        found: dict[str, tuple[Versions, EngineOptions]] = {}
        for entry in self._entries:
            for name, versions in entry.source.scan().items():
                if name in found:
                    raise OptionError(f"two models are named {name!r}; give one of them another name as NAME=MODEL")
                found[name] = versions, entry.options
        return found

    async def load_all(self) -> None:
        """Load every model there is. Raises what the first that fails raises."""
        for name, (versions, options) in (await asyncio.to_thread(self._scan)).items():
            await self._load(name, versions, options)

    async def load(self, name: str) -> None:
        """Load a model anew: its newest version, or all. What was served goes on until then and is then drained."""
        found = (await asyncio.to_thread(self._scan)).get(name)
        if found is None or not found[0]:
            raise ServiceError(FaultKind.NOT_FOUND, f"there is no model {name[:128]!r} in the repository")
        try:
            await self._load(name, *found)
        except BatchmakerError as error:
            _LOG.error("model cannot be loaded", extra={"model": name, "error": str(error)})
            raise ServiceError(
                FaultKind.INTERNAL, f"model {name!r} cannot be loaded; the server's log says why"
            ) from error

    async def _load(self, name: str, versions: Versions, options: EngineOptions) -> None:
        chosen = versions if self._policy == "all" else {max(versions, key=int): versions[max(versions, key=int)]}
        async with self._locks.setdefault(name, asyncio.Lock()):
            fresh: dict[str, ServedModel] = {}
            for version, make in chosen.items():
                if version not in self._served.get(name, {}):
                    self._states[name, version] = ("LOADING", "")
                try:
                    fresh[version] = await asyncio.to_thread(self._make, name, version, make, options)
                except Exception as error:
                    if version not in self._served.get(name, {}):
                        self._states[name, version] = ("UNAVAILABLE", str(fault_of(error)))
                    await _close_all(fresh, 0.0)
                    raise
            old, self._served[name] = self._served.get(name, {}), fresh
            for version in old:
                self._states[name, version] = ("UNAVAILABLE", "unloaded")
            for version in fresh:
                self._states[name, version] = ("READY", "")
                _LOG.info("model loaded", extra={"model": name, "version": version})
            await _close_all(old, self._limits.drain_seconds)

    def _make(self, name: str, version: str, make: Callable[[], Model], options: EngineOptions) -> ServedModel:
        """Return a loaded model, in a thread. What would end the event loop that waits for it is a ModelError."""
        try:
            return ServedModel(name, version, make(), options, self._limits, self._trace_steps)
        except Exception:
            raise
        except RAISED_BY_USERS as error:
            raise ModelError(f"model {name!r}: its code raised {said_by(error)} while it was loaded") from error

    async def unload(self, name: str) -> None:
        """Take no more requests for a model, finish those accepted and end its engines. NOT_FOUND if it has none."""
        if not self._served.get(name):
            raise ServiceError(FaultKind.NOT_FOUND, f"model {name[:128]!r} is not loaded")
        async with self._locks[name]:
            old = self._served.pop(name, {})
            for version in old:
                self._states[name, version] = ("UNLOADING", "")
            await _close_all(old, self._limits.drain_seconds)
            for version in old:
                self._states[name, version] = ("UNAVAILABLE", "unloaded")
                _LOG.info("model unloaded", extra={"model": name, "version": version})

    def get(self, name: str, version: str | None = None) -> ServedModel:
        """Return a loaded model, its newest version unless one is named. NOT_FOUND otherwise."""
        versions = self._served.get(name)
        if not versions:
            raise ServiceError(
                FaultKind.NOT_FOUND, f"there is no model {name[:128]!r}; GET /v2/repository/index lists them"
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
        """Return all that is loaded."""
        return [model for versions in self._served.values() for model in versions.values()]

    async def index(self, *, ready_only: bool = False) -> list[IndexLine]:
        """Return what is loaded, and what could be."""
        lines = {key: IndexLine(*key, *state) for key, state in self._states.items()}
        if not ready_only:
            for name, (versions, _) in (await asyncio.to_thread(self._scan)).items():
                for version in versions:
                    lines.setdefault((name, version), IndexLine(name, version, "UNAVAILABLE", "not loaded"))
        chosen = (line for line in lines.values() if not ready_only or line.state == "READY")
        return sorted(chosen, key=lambda line: (line.name, int(line.version)))

    @property
    def in_flight(self) -> int:
        """Requests accepted and not answered, of all models."""
        return sum(model.statistics.in_flight for model in self.models())

    @property
    def ready(self) -> bool:
        """Whether every loaded model takes requests."""
        return all(model.ready for model in self.models())

    async def close(self, within_s: float) -> bool:
        """Finish what was accepted, for `within_s` at most, and end all engines. Returns whether all was finished."""
        return await _close_all({str(number): model for number, model in enumerate(self.models())}, within_s)


async def _close_all(models: Mapping[str, ServedModel], within_s: float) -> bool:
    for model in models.values():
        model.refuse()
    return all(await asyncio.gather(*(model.close(within_s) for model in models.values())))
