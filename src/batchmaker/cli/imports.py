"""Modules imported without the collector of garbage."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the collector from looking while modules are imported, and at what they made for good: a million objects and
    no garbage. It would look at all of them again and again, in a sixth of the time that importing torch takes."""
    was_on, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules:
            gc.freeze()
        if was_on:
            gc.enable()
