"""Gives the memory of ended models back."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import weakref
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Final

_LOG = logging.getLogger("batchmaker.server")
_PASSES: Final = 3
_PAUSE_S: Final = 0.1


def leave_models_alone() -> None:
    """Exclude present objects from garbage collection: a pass over torch and a model takes 0.2 s."""
    gc.collect()
    gc.freeze()


async def free_memory(ended: Iterable[weakref.ref[Any]]) -> None:
    """Free what ended models have left, which nothing else would look at: present objects are frozen at the start.

    In a thread, since it takes as long as one pass over all objects, and then some to give free pages back. ended: the
    models. Race: the thread that loaded or stopped a model may keep it for a moment after the event loop has got the
    result; then the first pass finds it in use, and another one follows.
    """
    still_used = list(ended)
    for _ in range(_PASSES):
        await asyncio.to_thread(_free)
        still_used = [one for one in still_used if one() is not None]
        if not still_used:
            return
        await asyncio.sleep(_PAUSE_S)
    _LOG.warning("an ended model is still in use, and so is its memory", extra={"models": len(still_used)})


def _free() -> None:
    if gc.get_freeze_count():
        gc.unfreeze()
        leave_models_alone()
    else:
        gc.collect()
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
