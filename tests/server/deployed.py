"""The files of deploy/, as tests read them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from batchmaker.server.access.auth import KeyRing
from batchmaker.server.access.connections import Connections
from batchmaker.server.config import Config
from batchmaker.server.limits import Limits
from batchmaker.server.observe.metrics import Metrics
from batchmaker.server.reload import Reload
from batchmaker.server.service.repository import Repository
from batchmaker.server.service.service import Service

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
RUNBOOK = REPOSITORY / "docs" / "operations.md"
METRIC = re.compile(r"\b(?:batchmaker|nv_inference|process)_\w+")


def documents(path: str) -> list[dict[str, Any]]:
    """The YAML documents of a file below deploy/."""
    return list(yaml.safe_load_all((DEPLOY / path).read_text(encoding="utf-8")))


def alerts() -> list[dict[str, Any]]:
    (content,) = documents("prometheus/alerts.yaml")
    return [rule for group in content["groups"] for rule in group["rules"]]


@cache
def exported() -> frozenset[str]:
    """The names of all samples that a server can have, also those of which there is none yet."""
    limits = Limits()
    repository = Repository([], limits)
    reload = Reload(Config(), Config, KeyRing({}), repository)
    text = Metrics(Service(repository, limits), Connections(9, 9), None, reload).text().decode()
    endings = {"histogram": ("_bucket", "_sum", "_count")}
    types = re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE)
    return frozenset(name + ending for name, kind in types for ending in endings.get(kind, ("",)))
