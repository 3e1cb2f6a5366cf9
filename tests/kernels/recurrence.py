"""Recurrent layers in float64, step by step, and random problems for the kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from kernel_emulator import Answer, Problem

from batchmaker.kernels.template import KernelConfig


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _round(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(values).to(dtype).double().numpy()


def rounded(problem: Problem, dtype: torch.dtype) -> Problem:
    """Return the problem with the values that a kernel of this type is given; c stays in float32."""
    return replace(
        problem, **{name: _round(getattr(problem, name), dtype).astype(np.float32) for name in ("px", "w_hh", "h")}
    )


def expected_answer(config: KernelConfig, problem: Problem, dtype: torch.dtype = torch.float64) -> Answer:
    """Compute a problem in float64, one row after the other, rounding to `dtype` what the blocks exchange."""
    h_state, c_state = problem.h.astype(np.float64), problem.c.astype(np.float64)
    w_hh, bias_n = problem.w_hh.astype(np.float64), problem.bias_n.astype(np.float64)
    y, c_steps = (np.full((len(problem.px), config.hidden), np.nan) for _ in range(2))
    for offset, slot, length in zip(problem.px_offset, problem.slot, problem.length, strict=True):
        h, c = h_state[slot], c_state[slot]
        for t in range(length):
            at = offset + (t if problem.step_offset is None else problem.step_offset[t])
            x = problem.px[at].astype(np.float64).reshape(config.gates, -1)
            u = (w_hh @ h).reshape(config.gates, -1)
            if config.cell == "lstm":
                c = _sigmoid(x[1] + u[1]) * c + _sigmoid(x[0] + u[0]) * np.tanh(x[2] + u[2])
                h = _sigmoid(x[3] + u[3]) * np.tanh(c)
            else:
                r, z = _sigmoid(x[0] + u[0]), _sigmoid(x[1] + u[1])
                product = u[2] + bias_n if config.cell == "gru" else None
                last = r * product if product is not None else w_hh[2 * config.hidden :] @ _round(r * h, dtype)
                h = (1 - z) * np.tanh(x[2] + last) + z * h
            y[at] = h = _round(h, dtype)
            c_steps[at] = c
        h_state[slot], c_state[slot] = h, c
    return Answer("", h_state, c_state, y, c_steps if config.cell == "lstm" else None)


def random_problem(
    config: KernelConfig, seed: int, batch: int, max_length: int, *, time_major: bool = False
) -> Problem:
    """Make a problem with random lengths, longest first, on random slots; inputs lie row by row, or step by step."""
    random = np.random.default_rng(seed)
    length = -np.sort(-random.integers(0, max_length + 1, batch))
    bound = 1 / np.sqrt(config.hidden)
    slots = batch + int(random.integers(0, 4))
    if time_major:
        px_offset, step_offset, count = np.arange(batch), np.arange(max_length) * batch, batch * max_length
    else:
        px_offset, step_offset, count = np.concatenate([[0], np.cumsum(length)[:-1]]), None, max(1, int(length.sum()))
    return Problem(
        px=random.uniform(-2, 2, (count, config.gates * config.hidden)).astype(np.float32),
        px_offset=px_offset,
        slot=random.permutation(slots)[:batch],
        length=length,
        w_hh=random.uniform(-bound, bound, (config.gates * config.hidden, config.hidden)).astype(np.float32),
        bias_n=random.uniform(-bound, bound, config.hidden).astype(np.float32),
        h=random.uniform(-1, 1, (slots, config.hidden)).astype(np.float32),
        c=random.uniform(-1, 1, (slots, config.hidden)).astype(np.float32),
        step_offset=step_offset,
    )


def largest_error(found: Answer, expected: Answer) -> float:
    """Return the largest absolute difference; infinite where one has a number and the other has not."""
    worst = 0.0
    pairs = [(found.h, expected.h), (found.c, expected.c), (found.y, expected.y)]
    if found.c_steps is not None and expected.c_steps is not None:
        pairs.append((found.c_steps, expected.c_steps))
    for mine, right in pairs:
        if not np.array_equal(np.isnan(mine), np.isnan(right)):
            return float("inf")
        worst = max(worst, float(np.nanmax(np.abs(mine - right), initial=0.0)))
    return worst
