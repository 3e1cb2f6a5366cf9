"""Sequences of several lengths in one array or tensor: requests and results of many, without an object for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.errors import OptionError


@final
@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Sequences of several lengths, one after the other in one array.

        bm.Ragged(np.array([5, 3, 8, 1]), [3, 1])    # two sequences: 5, 3, 8 and 1

    values: [total, ...], a NumPy array or a tensor. lengths: [n] whole numbers, at least 0, with the sum total: a list,
    an array or a tensor; kept as int64. `len` counts the sequences. An index, `split` and an iteration give them, as
    views of `values`. Raises OptionError if the two do not fit.
    """

    values: Any
    lengths: NDArray[np.int64]
    _ends: NDArray[np.int64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.values, np.ndarray | Tensor) or self.values.ndim == 0:
            said = f"one of shape {tuple(self.values.shape)}" if hasattr(self.values, "shape") else type(self.values)
            raise OptionError(f"Ragged: values is an array or tensor [total, ...], got {said}")
        lengths = np.asarray(self.lengths)
        if lengths.ndim != 1 or (len(lengths) and lengths.dtype.kind not in "iu"):
            raise OptionError(
                f"Ragged: lengths is a list of whole numbers, got {lengths.dtype} of shape {lengths.shape}"
            )
        lengths = lengths.astype(np.int64)  # a copy: nobody changes it
        if len(lengths) and int(lengths.min()) < 0:
            raise OptionError(f"Ragged: lengths are at least 0, got {int(lengths.min())}")
        if int(lengths.sum()) != len(self.values):
            raise OptionError(f"Ragged: the lengths add up to {int(lengths.sum())}, got {len(self.values)} values")
        lengths.flags.writeable = False
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "_ends", np.cumsum(lengths))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        """Return one sequence, a view. Negative numbers count from the end. IndexError beyond the sequences."""
        end = int(self._ends[index])
        return self.values[end - int(self.lengths[index]) : end]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.split())

    def split(self) -> list[Any]:
        """Return all sequences, as views."""
        values = self.values
        return [values[begin:end] for begin, end in pairwise([0, *self._ends.tolist()])]

    @staticmethod
    def join(sequences: Sequence[Any]) -> Any:
        """Return the Ragged of sequences, each an array or tensor [length, ...] of one dtype and one shape after that.

        If they are lists, tuples or dicts of such sequences, all alike, the same with a Ragged at each place is
        returned. Raises OptionError for anything else, such as numbers.
        """
        if not sequences:
            return Ragged(torch.zeros(0), np.zeros(0, np.int64))
        first = sequences[0]
        kinds = set(map(type, sequences))
        if kinds == {Tensor} and first.ndim:
            if len({(one.dtype, one.shape[1:]) for one in sequences}) == 1:
                return Ragged(torch.cat(list(sequences)), np.array(list(map(len, sequences))))
        elif kinds == {np.ndarray} and first.ndim:
            if len({(one.dtype, one.shape[1:]) for one in sequences}) == 1:
                return Ragged(np.concatenate(sequences), np.array(list(map(len, sequences))))
        elif kinds in ({list}, {tuple}):
            if len(set(map(len, sequences))) == 1:
                return type(first)(map(Ragged.join, zip(*sequences, strict=True)))
        elif kinds == {dict} and all(one.keys() == first.keys() for one in sequences):
            return {name: Ragged.join([one[name] for one in sequences]) for name in first}
        said = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise OptionError(
            f"a Ragged is made of tensors that differ only in their first dimension, got {said} of several forms, or "
            "without a dimension; take the results as a list"
        )


def separate(requests: Iterable[Any] | Ragged) -> list[Any]:
    """Return requests that came together, one by one: views of what holds them."""
    return requests.split() if type(requests) is Ragged else list(requests)
