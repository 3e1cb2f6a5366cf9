"""Which ready cells run next, together. Each policy is one small file; `make` finds them by name.

Graph batching, what these are compared with, is loaded when it is asked for: see BASELINES.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

from batchmaker.errors import OptionError, unknown_name
from batchmaker.policies.agenda import AgendaPolicy, AgendaRemainingPolicy
from batchmaker.policies.auto import AutoPolicy
from batchmaker.policies.base import CellPolicy, GraphPolicy, ReadyView
from batchmaker.policies.cellular import CellularPolicy
from batchmaker.policies.depth import DepthPolicy
from batchmaker.policies.lazy import LazyPolicy
from batchmaker.policies.learned import LearnedPolicy
from batchmaker.policies.options import check_complete, check_option, read_options
from batchmaker.policies.sufficient import SufficientPolicy

POLICIES: Final[dict[str, type[CellPolicy]]] = {
    policy.name: policy
    for policy in (
        AgendaPolicy,
        AgendaRemainingPolicy,
        AutoPolicy,
        CellularPolicy,
        DepthPolicy,
        LazyPolicy,
        LearnedPolicy,
        SufficientPolicy,
    )
}

BASELINES: Final = dict.fromkeys(("graph", "orloj", "padded", "serial"), "batchmaker.lab.baselines")
"""By name, where policies are that batch whole requests: no engine that serves cells loads them."""


def names() -> list[str]:
    """Return the names of all policies."""
    return sorted((*POLICIES, *BASELINES))


def find(name: str) -> type[CellPolicy] | type[GraphPolicy]:
    """Return the class of a policy. OptionError names the nearest if there is none of that name."""
    if name in POLICIES:
        return POLICIES[name]
    if name not in BASELINES:
        raise unknown_name("policy", name, names())
    found: type[GraphPolicy] = importlib.import_module(BASELINES[name]).POLICIES[name]
    return found


def make(name: str, **options: Any) -> CellPolicy | GraphPolicy:
    """Return a new policy by name, which may carry options as text: `make("graph:window_ms=45,max_batch=32")`.

    OptionError names the nearest if the name or an option is not known; it also refuses an option that is given both
    ways or has a wrong value.
    """
    name, _, text = name.partition(":")
    policy = find(name)
    for option in options:
        check_option(name, policy, option)
    read = read_options(name, policy, text)
    if twice := sorted(read.keys() & options.keys()):
        raise OptionError(f"policy {name!r}: option {twice[0]} is given twice")
    check_complete(name, policy, read.keys() | options.keys())
    return policy(**read, **options)


__all__ = [
    "BASELINES",
    "POLICIES",
    "AgendaPolicy",
    "AgendaRemainingPolicy",
    "AutoPolicy",
    "CellPolicy",
    "CellularPolicy",
    "DepthPolicy",
    "GraphPolicy",
    "LazyPolicy",
    "LearnedPolicy",
    "ReadyView",
    "SufficientPolicy",
    "find",
    "make",
    "names",
]
