"""Common parts of all networks: seeded weights and checked requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from batchmaker.errors import InvalidRequestError, OptionError, RequestShapeError
from batchmaker.graph.values import ValueSequence
from batchmaker.model.stand_ins import holds_stand_ins, standing_frames, standing_tokens

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class WordIds(Protocol):
    """An argument of `encode` that gives ids, such as a datasets.Vocabulary."""

    def encode_words(self, words: Sequence[str]) -> NDArray[np.int64]: ...


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw weights from `seed` in the block, and leave torch's own generator unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def frozen(module: nn.Module, dtype: str) -> nn.Module:
    """Return the module in eval mode with weights of this dtype that need no gradient. OptionError for other dtypes."""
    if dtype not in DTYPES:
        raise OptionError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return module.to(DTYPES[dtype]).eval().requires_grad_(False)


def check_positive(**options: int) -> None:
    """Raise OptionError unless every option is at least 1."""
    for name, value in options.items():
        if value < 1:
            raise OptionError(f"{name} must be at least 1, got {value}")


def check_choice(option: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise OptionError unless the option has one of the allowed values."""
    if value not in allowed:
        raise OptionError(f"{option} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def zeros(count: int, hidden: int, dtype: str) -> tuple[Tensor, ...]:
    """Return the initial state of a stack of layers: `count` parts [hidden]."""
    return (torch.zeros(hidden, dtype=DTYPES[dtype]),) * count


def checked_tokens(tokens: Any, num_tokens: int, what: str) -> NDArray[np.int64]:
    """Return token ids as an array [count]. InvalidRequestError unless all are 0 <= id < num_tokens."""
    if holds_stand_ins(tokens):
        ids: NDArray[np.int64] = standing_tokens(tokens, num_tokens)
        return ids
    try:
        array = np.asarray(tokens)
    except ValueError as error:  # rows of different lengths
        raise InvalidRequestError(f"{what} must be a list of token ids ({error})") from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidRequestError(
            f"{what} must be a list of token ids, got {type(tokens).__name__} of shape {array.shape} and {array.dtype}"
        )
    if array.size == 0:
        raise InvalidRequestError(f"{what} is empty; at least one token is needed")
    ids = array.astype(np.int64, copy=False)
    if int(ids.view(np.uint64).max()) >= num_tokens:  # negative numbers are large without a sign
        position = int(np.flatnonzero((ids < 0) | (ids >= num_tokens))[0])
        raise InvalidRequestError(
            f"{what}: token {array[position]} at position {position} is outside the vocabulary 0..{num_tokens - 1}"
        )
    return ids


def checked_frames(frames: Any, width: int, what: str) -> NDArray[np.float32]:
    """Return a spectrogram as an array [frames, width]. InvalidRequestError unless it has this form and a frame."""
    if holds_stand_ins(frames):
        rows: NDArray[np.float32] = standing_frames(frames, width)
        return rows
    try:
        array = np.asarray(frames)
    except ValueError as error:  # rows of different lengths
        raise InvalidRequestError(f"{what} must be an array [frames, {width}] ({error})") from None
    if array.ndim != 2 or array.shape[1] != width or array.dtype.kind != "f":
        raise RequestShapeError(
            f"{what} must be an array [frames, {width}] of floats, got {array.dtype} of shape {array.shape}"
        )
    if len(array) == 0:
        raise InvalidRequestError(f"{what} is empty; at least one frame is needed")
    return array.astype(np.float32, copy=False)


def checked_vector(vector: Any, width: int, what: str) -> NDArray[np.float32]:
    """Return a vector as an array [width]. InvalidRequestError unless it has this form."""
    if holds_stand_ins(vector):
        (row,) = standing_frames([vector], width)
        stand_in: NDArray[np.float32] = row
        return stand_in
    try:
        array = np.asarray(vector)
    except ValueError as error:  # rows of different lengths
        raise InvalidRequestError(f"{what} must be a vector [{width}] of floats ({error})") from None
    if array.shape != (width,) or array.dtype.kind != "f":
        raise RequestShapeError(
            f"{what} must be a vector [{width}] of floats, got {array.dtype} of shape {array.shape}"
        )
    return array.astype(np.float32, copy=False)


def parts_of(state: Any) -> tuple[Any, ...]:
    """Return the outputs of a cell or module as a tuple, also if it is one value."""
    return state if isinstance(state, tuple) else (state,)


def joined(first: ValueSequence, second: ValueSequence) -> ValueSequence:
    """Return one sequence with the values of two, both the same output of cells with equal outputs."""
    one, other = first.numbers, second.numbers
    if type(one) is range and type(other) is range and one.stop == other.start and one.step == other.step == 1:
        return ValueSequence(range(one.start, other.stop), first.of, holds=(first, second))
    nodes = np.concatenate((first.nodes, second.nodes))
    return ValueSequence(nodes, first.of, holds=(first, second))


@final
class Classify(nn.Module):
    """h -> the label with the highest score, int64."""

    def __init__(self, hidden: int, labels: int) -> None:
        super().__init__()
        self.scores = nn.Linear(hidden, labels)

    def forward(self, h: Tensor) -> Tensor:
        label: Tensor = self.scores(h).argmax(-1)
        return label
