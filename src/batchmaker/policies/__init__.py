"""Which ready cells run next, together. Each policy is one small file; `make` finds them by name."""

from __future__ import annotations

from typing import Any

from batchmaker.errors import OptionError, unknown_name
from batchmaker.policies.base import CellPolicy, GraphPolicy, ReadyView
from batchmaker.policies.cellular import CellularPolicy
from batchmaker.policies.padded import PaddedPolicy, SerialPolicy

POLICIES: dict[str, type[CellularPolicy] | type[PaddedPolicy] | type[SerialPolicy]] = {
    "cellular": CellularPolicy,
    "padded": PaddedPolicy,
    "serial": SerialPolicy,
}


def make(name: str, **options: Any) -> CellPolicy | GraphPolicy:
    """Return a new policy by name. OptionError names the nearest if the name or an option is not known."""
    if name not in POLICIES:
        raise unknown_name("policy", name, POLICIES)
    try:
        return POLICIES[name](**options)
    except TypeError as error:
        raise OptionError(f"policy {name!r}: {error}") from None


__all__ = [
    "POLICIES",
    "CellPolicy",
    "CellularPolicy",
    "GraphPolicy",
    "PaddedPolicy",
    "ReadyView",
    "SerialPolicy",
    "make",
]
