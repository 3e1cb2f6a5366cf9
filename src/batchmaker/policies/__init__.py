"""The choice of the ready cells that run next, together. Each policy is one small file; `make` finds them by name.

The baselines for graph batching are loaded when they are asked for: see BASELINES.
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

BASELINES: Final = dict.fromkeys(("closed", "graph", "orloj", "padded", "serial"), "batchmaker.lab.baselines")
"""Modules of the policies that begin whole requests together, by name. An engine that serves cells never loads them."""


def names() -> list[str]:
    """Return the names of all policies."""
    return sorted((*POLICIES, *BASELINES))


def find(name: str) -> type[CellPolicy] | type[GraphPolicy]:
    """Return the class of a policy. For an unknown name OptionError names the nearest one."""
    if name in POLICIES:
        return POLICIES[name]
    if name not in BASELINES:
        raise unknown_name("policy", name, names())
    policy: type[CellPolicy] | type[GraphPolicy] = importlib.import_module(BASELINES[name]).POLICIES[name]
    return policy


def make(name: str, **options: Any) -> CellPolicy | GraphPolicy:
    """Return a new policy by name, which may carry options as text: `make("graph:window_ms=45,max_batch=32")`.

    For an unknown name or option OptionError names the nearest one. It also refuses an option that is given twice or
    has a wrong value.
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
