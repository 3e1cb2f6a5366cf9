"""PersistentLSTM and PersistentGRU beside nn.LSTM and nn.GRU, on layers that need no GPU: stepped, and emulated."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_emulator import Emulator, Problem
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from batchmaker.errors import DeviceError, ModelError, OptionError, ShapeError
from batchmaker.kernels import PersistentGRU, PersistentLSTM
from batchmaker.kernels.fallback import SteppedLayers
from batchmaker.kernels.layer import LayerWeights, RecurrentLayer
from batchmaker.kernels.template import KernelConfig

KINDS = {nn.LSTM: PersistentLSTM, nn.GRU: PersistentGRU}
FORMS = ["padded", "batch first", "unbatched", "packed", "packed unsorted"]


def persistent(module, layers=None):
    return KINDS[type(module)].from_module(module, layers=layers or SteppedLayers())


def example(form, width, batch=4, steps=5, dtype=torch.float32):
    random = torch.Generator().manual_seed(batch * 100 + steps)

    def normal(*shape):
        return torch.randn(*shape, generator=random).to(dtype)

    if form == "unbatched":
        return normal(steps, width)
    if form == "padded":
        return normal(steps, batch, width)
    if form == "batch first":
        return normal(batch, steps, width)
    lengths = [1 + (3 * i) % steps for i in range(batch)]
    if form == "packed":
        lengths.sort(reverse=True)
    return pack_sequence([normal(length, width) for length in lengths], enforce_sorted=form == "packed")


def initial_state(module, form, batch=4):
    count = module.num_layers * (2 if module.bidirectional else 1)
    shape = (count, module.hidden_size) if form == "unbatched" else (count, batch, module.hidden_size)
    random = torch.Generator().manual_seed(1)
    h, c = (torch.randn(shape, generator=random).to(module.weight_hh_l0.dtype) for _ in range(2))
    return (h, c) if isinstance(module, nn.LSTM) else h


def flat(answer):
    y, state = answer
    tensors = [y.data if isinstance(y, PackedSequence) else y, *(state if isinstance(state, tuple) else (state,))]
    return [tensor.detach() for tensor in tensors]


def assert_same(found, wanted, atol=1e-5):
    assert type(found[0]) is type(wanted[0])
    for mine, right in zip(flat(found), flat(wanted), strict=True):
        assert mine.dtype == right.dtype
        torch.testing.assert_close(mine, right, atol=atol, rtol=0)


@settings(max_examples=40, derandomize=True)
@given(
    kind=st.sampled_from([nn.LSTM, nn.GRU]),
    form=st.sampled_from(FORMS),
    layers=st.integers(1, 3),
    bidirectional=st.booleans(),
    bias=st.booleans(),
    given_state=st.booleans(),
)
def test_modules_answer_as_those_of_pytorch(kind, form, layers, bidirectional, bias, given_state):
    torch.manual_seed(0)
    batch_first = form == "batch first"
    module = kind(7, 6, layers, bias=bias, batch_first=batch_first, bidirectional=bidirectional).eval()
    source = example(form, 7)
    arguments = (source, initial_state(module, form)) if given_state else (source,)
    assert_same(persistent(module)(*arguments), module(*arguments))


class EmulatedLayer(RecurrentLayer):
    def __init__(self, emulator: Emulator, instance: int, weights: LayerWeights):
        super().__init__(weights)
        self.emulator = emulator
        self.instance = instance

    def run_rows(self, rows, px, h_state, c_state, y):
        hidden = self._weights.hidden
        bias_n = torch.zeros(hidden) if self._weights.bias_n is None else self._weights.bias_n
        problem = Problem(
            px=px.numpy(),
            px_offset=rows.px_offset,
            slot=rows.slot,
            length=rows.length,
            w_hh=self._weights.w_hh.numpy(),
            bias_n=bias_n.numpy(),
            h=h_state.numpy(),
            c=np.zeros_like(h_state.numpy()) if c_state is None else c_state.numpy(),
            step_offset=rows.step_offset,
        )
        answer = self.emulator.run(self.instance, problem, seed=len(px))
        assert answer.error == ""
        h_state.copy_(torch.from_numpy(answer.h))
        if c_state is not None:
            c_state.copy_(torch.from_numpy(answer.c))
        written = ~np.isnan(answer.y).any(axis=1)
        y[torch.from_numpy(written)] = torch.from_numpy(answer.y[written])


@dataclass
class EmulatedLayers:
    emulator: Emulator
    cells: list[str]

    def layer(self, weights):
        return EmulatedLayer(self.emulator, self.cells.index(weights.cell), weights)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    configs = [
        KernelConfig("lstm", "float32", "grid", 10, 2, 2, 2, 16, 2),
        KernelConfig("gru", "float32", "cluster", 10, 3, 4, 2, 16, 2),
    ]
    return EmulatedLayers(Emulator(tmp_path_factory.mktemp("modules"), configs), [config.cell for config in configs])


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_modules_on_the_emulated_kernel_answer_as_those_of_pytorch(emulated, kind, form):
    torch.manual_seed(0)
    module = kind(5, 10, 2, batch_first=form == "batch first", bidirectional=True).eval()
    arguments = (example(form, 5), initial_state(module, form))
    assert_same(persistent(module, emulated)(*arguments), module(*arguments))


def test_canonical_gru_resets_the_state_before_its_product():
    torch.manual_seed(0)
    module = nn.GRU(3, 4)
    source, h = example("padded", 3, batch=1), torch.zeros(4)
    found, _ = PersistentGRU.from_module(module, reset_after=False, layers=SteppedLayers())(source)
    w_ih, w_hh = module.weight_ih_l0.chunk(3), module.weight_hh_l0.chunk(3)
    bias = (module.bias_ih_l0 + module.bias_hh_l0).chunk(3)
    for t, x in enumerate(source[:, 0]):
        r, z = (torch.sigmoid(w_ih[i] @ x + w_hh[i] @ h + bias[i]) for i in (0, 1))
        h = (1 - z) * torch.tanh(w_ih[2] @ x + w_hh[2] @ (r * h) + bias[2]) + z * h
        torch.testing.assert_close(found[t, 0], h.detach(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_modules_stay_near_float32(dtype):
    torch.manual_seed(0)
    module = nn.LSTM(6, 8, 2).eval()
    source = example("padded", 6)
    found = persistent(_copied(module, dtype))(source.to(dtype))
    assert flat(found)[0].dtype == dtype
    torch.testing.assert_close(flat(found)[0].float(), flat(module(source))[0], atol=2e-2, rtol=0)


def _copied(module, dtype):
    other = nn.LSTM(module.input_size, module.hidden_size, module.num_layers)
    other.load_state_dict(module.state_dict())
    return other.to(dtype).eval()


def test_later_changes_of_the_weights_are_not_seen():
    module = nn.GRU(3, 4)
    copy = persistent(module)
    before = flat(copy(example("padded", 3)))[0]
    with torch.no_grad():
        module.weight_hh_l0.zero_()
        module.weight_ih_l0.zero_()
    assert torch.equal(flat(copy(example("padded", 3)))[0], before)


def test_the_initial_state_of_the_caller_is_not_changed():
    module = nn.LSTM(3, 4)
    state = initial_state(module, "padded")
    kept = [part.clone() for part in state]
    persistent(module)(example("padded", 3), state)
    assert all(torch.equal(mine, before) for mine, before in zip(state, kept, strict=True))


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (nn.RNN(3, 4), ModelError, "got RNN, wanted torch.nn.LSTM"),
        (nn.LSTM(3, 4, proj_size=2), OptionError, "proj_size is 2; .* wanted 0"),
        (nn.LSTM(3, 4, 2, dropout=0.5), OptionError, "dropout is 0.5 and the module trains"),
        (nn.LSTM(3, 4).double(), OptionError, "the weights are torch.float64, wanted one of torch.float32"),
    ],
)
def test_modules_that_cannot_be_served_are_refused(module, error, message):
    with pytest.raises(error, match=message):
        PersistentLSTM.from_module(module, layers=SteppedLayers())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(5, 4, 2),), r"shape \(5, 4, 2\), wanted 3 dimensions, or 2 without a batch, the last 3"),
        ((torch.zeros(3),), "wanted 3 dimensions"),
        ((torch.zeros(0, 4, 3),), "holds no step"),
        ((torch.zeros(5, 4, 3).double(),), "input is torch.float64, the weights are torch.float32"),
        ((pack_sequence([torch.zeros(2, 2)]),), "packed data of shape"),
        ((torch.zeros(5, 4, 3), torch.zeros(1, 4, 6)), "pair"),
        (
            (torch.zeros(5, 4, 3), (torch.zeros(1, 3, 6), torch.zeros(1, 4, 6))),
            r"h_0 .* wanted torch.float32 \(1, 4, 6\)",
        ),
        ((torch.zeros(5, 4, 3), (torch.zeros(1, 4, 6), torch.zeros(1, 6))), r"c_0 .* wanted"),
        ((torch.zeros(5, 3), (torch.zeros(1, 1, 6), torch.zeros(1, 6))), r"h_0 .* wanted torch.float32 \(1, 6\)"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ShapeError, match=message):
        persistent(nn.LSTM(3, 6))(*arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_without_a_gpu_the_error_says_what_is_missing(kind):
    with pytest.raises(DeviceError, match=r"no NVIDIA driver|batchmaker\[cuda\]|no GPU|move the module"):
        KINDS[kind].from_module(kind(3, 4))
