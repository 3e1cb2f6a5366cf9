"""Which ready cells run next, together. Each policy is one small file; `make` finds them by name."""

from __future__ import annotations

from typing import Any

from batchmaker.errors import OptionError, unknown_name
from batchmaker.policies.agenda import AgendaPolicy, AgendaRemainingPolicy
from batchmaker.policies.base import CellPolicy, GraphPolicy, ReadyView
from batchmaker.policies.cellular import CellularPolicy
from batchmaker.policies.depth import DepthPolicy
from batchmaker.policies.graph import WindowPolicy
from batchmaker.policies.lazy import LazyPolicy
from batchmaker.policies.learned import LearnedPolicy
from batchmaker.policies.options import check_complete, check_option, read_options
from batchmaker.policies.orloj import OrlojPolicy
from batchmaker.policies.padded import PaddedPolicy, SerialPolicy
from batchmaker.policies.sufficient import SufficientPolicy

POLICIES: dict[str, type[CellPolicy] | type[GraphPolicy]] = {
    policy.name: policy
    for policy in (
        AgendaPolicy,
        AgendaRemainingPolicy,
        CellularPolicy,
        DepthPolicy,
        LazyPolicy,
        LearnedPolicy,
        OrlojPolicy,
        PaddedPolicy,
        SerialPolicy,
        SufficientPolicy,
        WindowPolicy,
    )
}


def make(name: str, **options: Any) -> CellPolicy | GraphPolicy:
    """Return a new policy by name, which may carry options as text: `make("graph:window_ms=45,max_batch=32")`.

    OptionError names the nearest if the name or an option is not known; it also refuses an option that is given both
    ways or has a wrong value.
    """
    name, _, text = name.partition(":")
    if name not in POLICIES:
        raise unknown_name("policy", name, POLICIES)
    policy = POLICIES[name]
    for option in options:
        check_option(name, policy, option)
    read = read_options(name, policy, text)
    if twice := sorted(read.keys() & options.keys()):
        raise OptionError(f"policy {name!r}: option {twice[0]} is given twice")
    check_complete(name, policy, read.keys() | options.keys())
    return policy(**read, **options)


__all__ = [
    "POLICIES",
    "AgendaPolicy",
    "AgendaRemainingPolicy",
    "CellPolicy",
    "CellularPolicy",
    "DepthPolicy",
    "GraphPolicy",
    "LazyPolicy",
    "LearnedPolicy",
    "OrlojPolicy",
    "PaddedPolicy",
    "ReadyView",
    "SerialPolicy",
    "SufficientPolicy",
    "WindowPolicy",
    "make",
]
