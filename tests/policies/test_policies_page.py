"""docs/policies.md lists what there is."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from batchmaker import policies
from batchmaker.policies import CellPolicy
from batchmaker.policies.options import text_options

PAGE = Path(__file__).resolve().parents[2] / "docs" / "policies.md"
ROW = re.compile(r"^\| `([\w-]+)` \| (\w+) \| .* \| (.*) \|$", re.MULTILINE)


def shown(default: object) -> str:
    if default is inspect.Parameter.empty:
        return "required"
    return {True: "yes", False: "no", None: "none"}.get(default) if isinstance(default, bool | None) else f"{default}"


def test_the_page_has_every_policy_with_what_it_chooses_from_and_its_options():
    listed = {
        name: (kind, dict(re.findall(r"`(\w+)` \(([^)]*)\)", options)))
        for name, kind, options in ROW.findall(PAGE.read_text("utf-8"))
    }
    expected = {}
    for name in policies.names():
        policy = policies.find(name)
        kind = "cells" if issubclass(policy, CellPolicy) else "requests"
        expected[name] = (kind, {option: shown(default) for option, default in text_options(policy).items()})
    assert listed == expected
