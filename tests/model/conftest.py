"""Unfolding of requests against one registry per file, so that cells are bound once."""

from __future__ import annotations

import pytest
from unfolding_forms import Begin, Forms, WaitingForms, begun

from batchmaker.model.registry import CellRegistry
from batchmaker.model.unfolding import Unfolding


@pytest.fixture(scope="module")
def registry() -> CellRegistry:
    """One registry for all tests of this file: cells are bound once."""
    return CellRegistry()


@pytest.fixture(scope="module")
def forms() -> Forms:
    return Forms()


@pytest.fixture(scope="module")
def waiting_forms() -> WaitingForms:
    return WaitingForms()


@pytest.fixture
def begin(registry: CellRegistry, forms: Forms) -> Begin:
    """Unfold a request of `Forms`."""
    return lambda request, **options: begun(Unfolding(forms, registry, request, **options))


@pytest.fixture
def wait(registry: CellRegistry, waiting_forms: WaitingForms) -> Begin:
    """Unfold a request of `WaitingForms`, as far as its first `yield`."""
    return lambda request, **options: begun(Unfolding(waiting_forms, registry, request, **options))
