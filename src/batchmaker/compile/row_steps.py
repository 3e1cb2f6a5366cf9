"""Operations over whole rows of float32, compiled once for all cells: softmax, norms, sums, the greatest number."""

from __future__ import annotations

from typing import Any

import numpy as np

from batchmaker.arrays import Ints
from batchmaker.compile.passes.interpreter import load, store
from batchmaker.compile.typed_steps import WIDTH, place
from batchmaker.compiled import compiled_part
from batchmaker.kernels.cpu.machine import float64_at, write_int64
from batchmaker.kernels.pointwise import exp

SOFTMAX, LOG_SOFTMAX, LAYER_NORM, RMS_NORM, SUM, MEAN, LENGTH, GREATEST, LEAST, BEST = range(10)
"""Operations of a record. Those up to RMS_NORM give a row, the others a number: LENGTH is the root of the sum of the
squares, and BEST is the place of the greatest."""

CODE, RESULT, SOURCE, ROW_WIDTH, WEIGHT, BIAS, EPSILON, ROW_FIELDS = range(8)
"""Fields of a record: the operation, values, the numbers in a row, of which a value's row may have several; and, of
norms, the addresses of factors and summands (0: none) and of what is added to the mean square."""

_ZERO, _ONE = np.float32(0), np.float32(1)


@compiled_part
def greatest(a: int, width: int) -> Any:
    """Return the greatest number; NaN if there is one."""
    most = load(a, 0)
    for j in range(1, width):
        x = load(a, j)
        if x > most or x != x:
            most = x
    return most


@compiled_part
def least(a: int, width: int) -> Any:
    """Return the least number; NaN if there is one."""
    lowest = load(a, 0)
    for j in range(1, width):
        x = load(a, j)
        if x < lowest or x != x:
            lowest = x
    return lowest


@compiled_part
def place_of_greatest(a: int, width: int) -> int:
    """Return the place of the greatest number, the first of them; of a NaN, if there is one."""
    best, most = 0, load(a, 0)
    for j in range(1, width):
        x = load(a, j)
        if x > most or (x != x and most == most):
            best, most = j, x
    return best


@compiled_part
def total(a: int, width: int) -> Any:
    made = _ZERO
    for j in range(width):
        made += load(a, j)
    return made


@compiled_part
def length(a: int, width: int) -> Any:
    squares = _ZERO
    for j in range(width):
        squares += load(a, j) * load(a, j)
    return np.sqrt(squares)


@compiled_part
def softmax(a: int, d: int, width: int) -> None:
    """d = e^a over its sum."""
    most, made = greatest(a, width), _ZERO
    for j in range(width):
        x = exp(load(a, j) - most)
        store(d, j, x)
        made += x
    share = _ONE / made
    for j in range(width):
        store(d, j, load(d, j) * share)


@compiled_part
def log_softmax(a: int, d: int, width: int) -> None:
    """d = a - log(the sum of e^a)."""
    most, made = greatest(a, width), _ZERO
    for j in range(width):
        made += exp(load(a, j) - most)
    below = np.log(made)
    for j in range(width):
        store(d, j, load(a, j) - most - below)


@compiled_part
def normalise(a: int, d: int, width: int, mean: Any, weight: int, bias: int, epsilon: int) -> None:
    """d = (a - mean) over the root of its mean square and epsilon, times weight, plus bias."""
    squares = _ZERO
    for j in range(width):
        x = load(a, j) - mean
        squares += x * x
    share = _ONE / np.sqrt(squares / np.float32(width) + np.float32(float64_at(epsilon, 0)))
    for j in range(width):
        store(d, j, (load(a, j) - mean) * share)
    if weight:
        for j in range(width):
            store(d, j, load(d, j) * load(weight, j))
    if bias:
        for j in range(width):
            store(d, j, load(d, j) + load(bias, j))


@compiled_part
def work_on_rows(record: Ints, n: int, done: int, values: Ints) -> None:
    """Do the operation of a record on all rows of n rows of a value."""
    code, width = record[CODE], record[ROW_WIDTH]
    source, result = place(values, record[SOURCE], done), place(values, record[RESULT], done)
    weight, bias, epsilon = record[WEIGHT], record[BIAS], record[EPSILON]
    for row in range(n * values[record[SOURCE], WIDTH] // width):
        a, d = source + row * width * 4, result + row * width * 4
        if code == SOFTMAX:
            softmax(a, d, width)
        elif code == LOG_SOFTMAX:
            log_softmax(a, d, width)
        elif code == LAYER_NORM:
            normalise(a, d, width, total(a, width) / np.float32(width), weight, bias, epsilon)
        elif code == RMS_NORM:
            normalise(a, d, width, _ZERO, weight, bias, epsilon)
        elif code == SUM:
            store(result, row, total(a, width))
        elif code == MEAN:
            store(result, row, total(a, width) / np.float32(width))
        elif code == LENGTH:
            store(result, row, length(a, width))
        elif code == GREATEST:
            store(result, row, greatest(a, width))
        elif code == LEAST:
            store(result, row, least(a, width))
        else:
            write_int64(result, row, place_of_greatest(a, width))
