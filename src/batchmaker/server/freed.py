"""Gives the memory of ended models back."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable
from functools import lru_cache


def leave_models_alone() -> None:
    """Exclude present objects from garbage collection: a pass over torch and a model takes 0.2 s."""
    gc.collect()
    gc.freeze()


async def free_memory() -> None:
    """Free what ended models have left, which nothing else would look at: present objects are frozen at the start.

    In a thread, since it takes as long as one pass over all objects, and then some to give free pages back.
    """
    await asyncio.to_thread(_free)


def _free() -> None:
    gc.unfreeze()
    leave_models_alone()
    _trim()


@lru_cache(maxsize=1)
def _trimmer() -> Callable[[int], int] | None:
    """Return glibc's malloc_trim, None where there is another C library."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def _trim() -> None:
    """Give free pages to the system: glibc keeps what was freed in the middle of its heaps, gigabytes of a model."""
    trim = _trimmer()
    if trim is not None:
        trim(0)
