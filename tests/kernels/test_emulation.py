"""The kernel's own source, run on the host under a random scheduler and an adversarial memory, against float64."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_emulator import TORCH_TYPES, Emulator
from recurrence import expected_answer, largest_error, random_problem, rounded

from batchmaker.errors import OptionError
from batchmaker.kernels.configuration import Problem as Shape
from batchmaker.kernels.configuration import candidates
from batchmaker.kernels.cost import ranked
from batchmaker.kernels.devices import H200
from batchmaker.kernels.template import KernelConfig
from batchmaker.kernels.tiling import step_sums

#                 cell, dtype, regime, hidden, tile width and height, groups, group size, row step, shared steps
FLOAT32 = [
    KernelConfig("lstm", "float32", "grid", 37, 3, 4, 2, 16, 2),
    KernelConfig("lstm", "float32", "grid", 64, 1, 3, 8, 4, 3, 2),
    KernelConfig("lstm", "float32", "cluster", 50, 2, 4, 8, 32, 4, 1),
    KernelConfig("lstm", "float32", "block", 20, 5, 3, 4, 8, 1),
    KernelConfig("gru", "float32", "grid", 24, 2, 6, 4, 8, 3, 1),
    KernelConfig("gru", "float32", "cluster", 30, 5, 2, 1, 64, 2),
    KernelConfig("gru", "float32", "block", 9, 3, 2, 4, 32, 2),
    KernelConfig("gru-before", "float32", "grid", 40, 5, 2, 1, 64, 2),
    KernelConfig("gru-before", "float32", "cluster", 33, 3, 4, 4, 16, 4),
    KernelConfig("gru-before", "float32", "block", 16, 2, 2, 8, 4, 1, 1),
    KernelConfig("gru-before-once", "float32", "grid", 40, 5, 2, 1, 64, 2),
    KernelConfig("gru-before-once", "float32", "grid", 37, 3, 3, 4, 8, 1, 1),
]
TENSOR = [
    KernelConfig("lstm", "bfloat16", "grid", 70, 8, 16, 2, 64, 8, 1),
    KernelConfig("lstm", "float16", "block", 32, 8, 8, 4, 32, 8),
    KernelConfig("gru", "float16", "cluster", 48, 16, 8, 1, 64, 8),
    KernelConfig("gru", "bfloat16", "grid", 40, 16, 16, 1, 32, 16),
    KernelConfig("gru-before", "bfloat16", "block", 30, 16, 8, 2, 32, 8),
]
BOUNDS = {"float32": 1e-5, "bfloat16": 2 * 2**-8, "float16": 2 * 2**-11}
"""Of 16-bit types two units of the last place of values near one: a sum in another order may round h otherwise."""
SEEDS = st.integers(0, 2**32 - 1)


def named(config):
    return config.name_expression


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(tmp_path_factory.mktemp("emulation"), FLOAT32 + TENSOR)


@pytest.mark.parametrize("config", FLOAT32, ids=named)
@settings(max_examples=4, derandomize=True)
@given(
    seed=SEEDS, batch=st.integers(1, 9), longest=st.integers(1, 5), teams=st.integers(1, 2), time_major=st.booleans()
)
def test_float32_agrees_with_float64(emulator, config, seed, batch, longest, teams, time_major):
    problem = random_problem(config, seed, batch, longest, time_major=time_major)
    answer = emulator.run(FLOAT32.index(config), problem, seed, teams)
    assert answer.error == ""
    assert largest_error(answer, expected_answer(config, problem)) < 1e-5


@pytest.mark.parametrize("config", TENSOR, ids=named)
@settings(max_examples=3, derandomize=True)
@given(seed=SEEDS, batch=st.integers(1, 20), longest=st.integers(1, 5), teams=st.integers(1, 2))
def test_tensor_cores_agree_with_float64_that_rounds_h_in_each_step(emulator, config, seed, batch, longest, teams):
    dtype = TORCH_TYPES[config.dtype]
    problem = rounded(random_problem(config, seed, batch, longest), dtype)
    answer = emulator.run(len(FLOAT32) + TENSOR.index(config), problem, seed, teams)
    assert answer.error == ""
    assert largest_error(answer, expected_answer(config, problem, dtype)) < BOUNDS[config.dtype]


@pytest.mark.parametrize("config", FLOAT32[:3], ids=named)
def test_sums_are_added_in_the_order_of_the_specification(emulator, config):
    """Terms of 1e5 that cancel leave rounding errors of some 1e-2, which depend on the order of the additions."""
    random = np.random.default_rng(1)
    problem = random_problem(config, 1, batch=1, max_length=1)
    w_hh = problem.w_hh.copy()
    for row in w_hh:
        half = random.uniform(-1e5, 1e5, config.hidden // 2).astype(np.float32)
        row[random.permutation(config.hidden)[: 2 * len(half)]] = np.concatenate([half, -half])
    problem = replace(
        problem,
        w_hh=w_hh,
        h=np.ones_like(problem.h),  # so that products are exact, fused or not
        c=np.ones_like(problem.c),
        length=np.ones(1, int),
    )
    answer = emulator.run(FLOAT32.index(config), problem)
    assert answer.error == ""
    found = answer.c[problem.slot]

    def c_after(sums):
        i, f, g, _ = (problem.px[0].astype(np.float64) + sums).reshape(4, -1)
        return 1 / (1 + np.exp(-f)) + np.tanh(g) / (1 + np.exp(-i))

    assert np.abs(found - c_after(step_sums(config, w_hh, problem.h[:1])[0])).max() < 1e-5
    assert np.abs(found - c_after(w_hh.astype(np.float64).sum(axis=1))).max() > 1e-3


def test_rows_that_are_not_sorted_come_out_right_all_the_same(emulator):
    problem = random_problem(FLOAT32[0], 3, batch=7, max_length=5)
    order = np.random.default_rng(3).permutation(7)
    shuffled = replace(
        problem, px_offset=problem.px_offset[order], slot=problem.slot[order], length=problem.length[order]
    )
    answer = emulator.run(0, shuffled, seed=3)
    assert answer.error == ""
    assert largest_error(answer, expected_answer(FLOAT32[0], shuffled)) < 1e-5


def test_splitting_a_call_into_calls_of_fewer_steps_changes_no_bit(emulator):
    config = FLOAT32[4]
    problem = random_problem(config, 5, batch=5, max_length=1, time_major=True)
    steps = 4
    random = np.random.default_rng(5)
    px = random.uniform(-2, 2, (5 * steps, problem.px.shape[1])).astype(np.float32)
    whole = replace(problem, px=px, length=np.full(5, steps), step_offset=np.arange(steps) * 5)
    together = emulator.run(4, whole, seed=1)
    h = whole.h
    for t in range(steps):
        step = replace(whole, h=h, length=np.ones(5, int), px_offset=np.arange(5) + 5 * t)
        h = emulator.run(4, step, seed=t).h
    assert np.array_equal(h, together.h)


@pytest.mark.slow
def test_what_the_tuner_chooses_computes_its_layer(tmp_path):
    """With the layer's real size: up to 64 blocks of 256 threads."""
    sizes = [
        ("lstm", "float32", 64, 10),
        ("lstm", "float32", 1024, 4),
        ("gru", "float32", 256, 10),
        ("gru", "bfloat16", 1024, 20),
        ("lstm", "bfloat16", 256, 20),
        ("gru-before", "float16", 128, 10),
        ("gru-before-once", "float32", 256, 10),
    ]
    shapes = [Shape(cell=cell, dtype=dtype, hidden=hidden, batch=batch) for cell, dtype, hidden, batch in sizes]
    configs = [ranked(shape, list(candidates(shape, H200)), H200)[0][0] for shape in shapes]
    assert {config.regime for config in configs} == {"block", "cluster", "grid"}
    emulator = Emulator(tmp_path, configs)
    for number, (shape, config) in enumerate(zip(shapes, configs, strict=True)):
        dtype = TORCH_TYPES[config.dtype]
        problem = rounded(
            random_problem(config, number, shape.batch, max_length=1 if config.hidden == 1024 else 2), dtype
        )
        answer = emulator.run(number, problem, seed=number)
        assert answer.error == ""
        assert largest_error(answer, expected_answer(config, problem, dtype)) < BOUNDS[config.dtype]


def random_configurations(seed, count):
    """Yield configurations with sizes that divide nothing, some of their weights in shared memory."""
    random = np.random.default_rng(seed)
    while count:
        dtype = str(random.choice(["float32", "float32", "bfloat16", "float16"]))
        tensor = dtype != "float32"
        row_step = int(random.choice([8, 16] if tensor else [1, 2, 3, 5]))
        config = KernelConfig(
            cell=str(random.choice(["lstm", "gru", "gru-before"])),
            dtype=dtype,
            regime=str(random.choice(["block", "cluster", "grid"])),
            hidden=int(random.integers(1, 90)),
            tile_width=int(random.choice([4, 8, 16, 32] if tensor else [1, 2, 3, 5, 7])),
            tile_height=row_step * int(random.integers(1, 4)),
            groups=int(random.choice([1, 2, 3, 4, 16, 32])),
            group_size=int(random.choice([32, 64, 128] if tensor else [1, 2, 4, 8, 16, 32, 64])),
            row_step=row_step,
        )
        config = replace(config, shared_steps=int(random.integers(0, config.steps + 1)))
        with contextlib.suppress(OptionError):  # about half of them cannot be
            config.check()
            count -= 1
            yield config


@pytest.mark.slow
def test_random_configurations_compute_their_layer(tmp_path):
    configs = list(random_configurations(seed=0, count=12))
    emulator = Emulator(tmp_path, configs)
    for number, config in enumerate(configs):
        dtype = TORCH_TYPES[config.dtype]
        for seed, batch in enumerate((1, config.tile_height, 2 * config.tile_height + 1)):
            problem = rounded(random_problem(config, seed, batch, max_length=3), dtype)
            answer = emulator.run(number, problem, seed, teams=1 + seed % 2)
            assert answer.error == ""
            assert largest_error(answer, expected_answer(config, problem, dtype)) < BOUNDS[config.dtype]
