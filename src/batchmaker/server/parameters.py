"""The parameters of a request that mean something to the server; all others pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from batchmaker.server.faults import FaultKind, ServiceError, invalid
from batchmaker.server.messages import Parameter

DAY_S: Final = 86_400.0
"""Deadlines are within a day."""

_MAX_PRIORITY: Final = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class CallOptions:
    """How the engine is to treat a request. deadline_ms: from its arrival, waiting included. priority: larger first."""

    deadline_ms: float | None = None
    priority: int = 0


_DEFAULT: Final = CallOptions()


def call_options(parameters: Mapping[str, Parameter]) -> CallOptions:
    """Return what a request's parameters ask for.

    `timeout` (microseconds) and `deadline_ms`: the earlier counts, 0 is none. `priority`: 1 is the highest; without
    one, or with 0, a request comes after all that have one.
    """
    if not parameters:
        return _DEFAULT
    if parameters.get("sequence_id") not in (None, 0, ""):
        raise ServiceError(FaultKind.UNSUPPORTED, "sequences (sequence_id) are not supported")
    given = [
        milliseconds
        for name, unit_ms in (("timeout", 1e-3), ("deadline_ms", 1.0))
        if (milliseconds := _milliseconds(name, parameters.get(name), unit_ms)) is not None
    ]
    return CallOptions(min(given, default=None), _priority(parameters.get("priority")))


def refuse_unsupported(name: str, parameters: Mapping[str, Parameter]) -> None:
    """Raise UNSUPPORTED for an input or output whose own parameters ask for what this server does not do."""
    if parameters.get("classification"):
        raise ServiceError(FaultKind.UNSUPPORTED, f"tensor {name!r}: classification is not supported; ask for the data")
    if "shared_memory_region" in parameters:
        raise ServiceError(FaultKind.UNSUPPORTED, f"tensor {name!r}: shared memory is not supported; send the data")


def _milliseconds(name: str, value: Parameter, unit_ms: float) -> float | None:
    if value is None or value == 0:
        return None
    if isinstance(value, bool | str) or not 0 < value * unit_ms <= 1e3 * DAY_S:
        unit = "microseconds" if name == "timeout" else "milliseconds"
        raise invalid(f"parameter {name!r} must be a number of {unit} above 0 and within a day, got {value!r}")
    return value * unit_ms


def _priority(value: Parameter) -> int:
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_PRIORITY:
        raise invalid(f"parameter 'priority' must be a whole number, 0 (default) or 1 (highest) and on, got {value!r}")
    return _MAX_PRIORITY + 1 - value if value else 0
