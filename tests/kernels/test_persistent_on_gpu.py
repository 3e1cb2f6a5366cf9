"""The kernels on a GPU against float64. Nothing here runs without one."""

from __future__ import annotations

import pytest
import torch
from kernel_emulator import Answer
from recurrence import expected_answer, largest_error, random_problem, rounded
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from batchmaker.kernels import PersistentGRU, PersistentLSTM
from batchmaker.kernels.configuration import Problem as Shape
from batchmaker.kernels.configuration import candidates
from batchmaker.kernels.found import found_device
from batchmaker.kernels.launch import CudaLayers, LoadedKernel
from batchmaker.kernels.layer import LayerWeights
from batchmaker.kernels.nvrtc import Nvrtc
from batchmaker.kernels.rows import call_rows
from batchmaker.kernels.source import kernel_source
from insides import recorded_sizes

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def in_float64(module, *arguments):
    """Run a module of PyTorch on the CPU in float64."""
    twin = type(module)(module.input_size, module.hidden_size, module.num_layers, bidirectional=module.bidirectional)
    twin.load_state_dict(module.state_dict())
    with torch.no_grad():
        return twin.double().cpu().eval()(*(each.double().cpu() for each in arguments))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("hidden", "batch"), [(64, 1), (64, 20), (100, 7), (256, 10), (512, 3), (1024, 20), (1024, 64)]
)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_persistent_modules_agree_with_float64(tmp_path, kind, hidden, batch, dtype):
    torch.manual_seed(0)
    module = kind(hidden, hidden).to("cuda", dtype).eval()
    source = torch.randn(30, batch, hidden, device="cuda", dtype=dtype)
    layers = CudaLayers.for_device(torch.device("cuda", 0), tmp_path)
    persistent = {nn.LSTM: PersistentLSTM, nn.GRU: PersistentGRU}[kind].from_module(module, layers=layers)
    for _ in range(3):  # the counters of the barrier go on from call to call
        found, _ = persistent(source)
    expected, _ = in_float64(module, source)
    torch.testing.assert_close(found.double().cpu(), expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_bidirectional_stacks_agree_with_float64(tmp_path, kind):
    torch.manual_seed(0)
    module = kind(96, 256, 2, bidirectional=True).cuda().eval()
    source = pack_sequence([torch.randn(n, 96, device="cuda") for n in (3, 50, 17, 1, 50)], enforce_sorted=False)
    layers = CudaLayers.for_device(torch.device("cuda", 0), tmp_path)
    persistent = {nn.LSTM: PersistentLSTM, nn.GRU: PersistentGRU}[kind].from_module(module, layers=layers)
    found, _ = persistent(source)
    expected, _ = in_float64(module, source)
    torch.testing.assert_close(found.data.double().cpu(), expected.data, atol=1e-5, rtol=0)


def test_what_no_kernel_holds_replays_recorded_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(CudaLayers, "loaded", lambda *_: None)
    torch.manual_seed(0)
    module = nn.LSTM(64, 96).cuda().eval()
    source = pack_sequence([torch.randn(n, 64, device="cuda") for n in (70, 3, 41)], enforce_sorted=False)
    layers = CudaLayers.for_device(torch.device("cuda", 0), tmp_path)
    persistent = PersistentLSTM.from_module(module, layers=layers)
    for _ in range(2):
        found, _ = persistent(source)
    assert recorded_sizes(persistent) == [(4, 32)]
    expected, _ = in_float64(module, source)
    torch.testing.assert_close(found.data.double().cpu(), expected.data, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("cell", ["lstm", "gru", "gru-before"])
@pytest.mark.parametrize("regime", ["block", "cluster", "grid"])
def test_ragged_rows_in_any_slots_agree_with_float64(cell, dtype, regime):
    found = found_device()
    shape = Shape(
        cell=cell,
        dtype=str(dtype).removeprefix("torch."),
        hidden=64 if regime == "block" else 256,
        batch=9,
    )
    config = next((each for each in candidates(shape, found.device) if each.regime == regime), None)
    if config is None:
        pytest.skip(f"no configuration of regime {regime} for this GPU")
    problem = rounded(random_problem(config, seed=0, batch=9, max_length=12, time_major=True), dtype)
    expected = expected_answer(config, problem, dtype)
    w_hh, px, h = (torch.from_numpy(each).to("cuda", dtype) for each in (problem.w_hh, problem.px, problem.h))
    c = torch.from_numpy(problem.c).cuda() if cell == "lstm" else None
    bias_n = torch.from_numpy(problem.bias_n).cuda() if cell == "gru" else None
    y = torch.full((len(px), config.hidden), torch.nan, dtype=dtype, device="cuda")
    compiled = Nvrtc().compile(kernel_source(), config.name_expression, found.arch)
    kernel = LoadedKernel(config, compiled, LayerWeights(cell, w_hh, bias_n))
    rows = call_rows(
        problem.px_offset,
        problem.slot,
        problem.length,
        None,
        problem.step_offset,
        num_inputs=len(px),
        num_slots=len(h),
        num_outputs=len(y),
    )
    kernel.run(rows, px, h, c, y)
    answer = Answer("", h.float().cpu().numpy(), problem.c if c is None else c.cpu().numpy(), y.float().cpu().numpy())
    assert largest_error(answer, expected) < TOLERANCE[dtype]
