"""Long work of the event loop, in pieces: between two of them everybody else gets a turn."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeVar, final

_Result = TypeVar("_Result")

Pieces = Generator[None, None, _Result]
"""Work that yields between its pieces and returns its result."""


def at_once(work: Pieces[_Result]) -> _Result:
    """Return the result of all pieces, one after the other."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


@final
class PieceQueue:
    """Does work in pieces: one piece in a turn of the event loop, whoever it is for.

    A thread would not help: what takes long here holds the interpreter, which the event loop needs too.
    """

    def __init__(self) -> None:
        self._one = asyncio.Lock()

    async def finish(self, work: Pieces[_Result]) -> _Result:
        """Return the result. Works in progress take turns, so a short one does not wait for the end of a long one.

        Cancelled, the work is left at its last piece.
        """
        while True:
            async with self._one:  # it is handed on in the order in which it was asked for
                try:
                    next(work)
                except StopIteration as end:
                    return end.value  # type: ignore[no-any-return]
            await asyncio.sleep(0)  # where nobody else wants it, the lock alone would not let others run
