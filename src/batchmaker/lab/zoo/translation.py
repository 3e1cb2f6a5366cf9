"""Common parts of networks that write words one by one: their requests, and decoding of a padded batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from batchmaker.compile.declaration import Declared
from batchmaker.errors import InvalidRequestError, OptionError
from batchmaker.graph.spec import ValueSpec
from batchmaker.model.cell import Cell

BOS: Final = 1
"""The input of a decoder before its first word; the same id as in datasets."""
EOS: Final = 2
"""The word that ends a text; the same id as in datasets."""


@final
@dataclass(frozen=True, slots=True)
class Order:
    """The content of a request. source: tokens or frames. words: the most to write.

    until: the word that ends the text earlier, if any.
    """

    source: NDArray[Any]
    words: int
    until: int | None


def check_vocabulary(vocabulary_size: int) -> None:
    """Raise OptionError unless the vocabulary has BOS and EOS."""
    if vocabulary_size <= EOS:
        raise OptionError(f"vocabulary_size must be above {EOS}, the id of EOS, got {vocabulary_size}")


def read_order(request: Any, *, until_eos: bool = True) -> tuple[Any, int | None, int | None]:
    """Return the source, the number of words if the request gives it, and otherwise the word that ends the text.

    A request is a source alone, or {"source": source, "words": n} for exactly n words. Raises InvalidRequestError for
    other keys, or if words is not a whole number of at least 1.
    """
    if not isinstance(request, Mapping):
        return request, None, EOS if until_eos else None
    if set(request) != {"source", "words"}:
        raise InvalidRequestError(
            f"a request is a source, or a dict with 'source' and 'words'; got the keys {sorted(map(str, request))}"
        )
    words = request["words"]
    if isinstance(words, bool) or not isinstance(words, int | np.integer) or words < 1:
        raise InvalidRequestError(f"words must be a whole number of at least 1, got {words!r}")
    return request["source"], int(words), None


def decoder_cell(decoder: nn.Module, state: Sequence[ValueSpec], *, max_batch: int, priority: int) -> Cell:
    """Return the cell of a decoder, forward(word, *state) -> (next word, *state), whose state may start from zeros."""
    rows = (ValueSpec((), "int64"), *state)
    return Cell(decoder, max_batch=max_batch, priority=priority, host_outputs=(0,), declared=Declared(rows, rows))


def check_places(what: str, count: int, places: int) -> None:
    """Raise InvalidRequestError if a network has fewer places than needed."""
    if count > places:
        raise InvalidRequestError(f"{what}: got {count}, the network takes at most {places} (option positions)")


def write(
    step: Callable[[Tensor], Tensor], limits: Sequence[int], until: Sequence[int | None], first: Tensor | None = None
) -> list[Tensor]:
    """Feed words back to a padded batch until each row has its words; return them by row, int64.

    step: the last words [batch] -> the next ones. limits: most words of each row. until: the word that ends each
    earlier, if any. first: the words that the first step gets, by default BOS.
    """
    most = torch.tensor(limits)
    ends = torch.tensor([-1 if word is None else word for word in until])
    words = torch.full((len(limits),), BOS) if first is None else first
    steps: list[Tensor] = []
    while bool((most > len(steps)).any()):
        words = step(words)
        steps.append(words)
        most = torch.where(words == ends, most.clamp(max=len(steps)), most)
    rows = torch.stack(steps, 1)
    return [row[:limit].clone() for row, limit in zip(rows, most.tolist(), strict=True)]
