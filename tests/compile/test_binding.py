"""A bound cell computes what its module computes, however it was made fast."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from batchmaker.compile.binding import BoundCell, bind
from batchmaker.compile.export import example_rows, export_cell, flat_outputs
from batchmaker.errors import ModelError, ShapeError
from batchmaker.graph.spec import ValueSpec
from covering import covering

TOKEN = ValueSpec((), "int64")


def rows(*widths: int, dtype: str = "float32") -> tuple[ValueSpec, ...]:
    return tuple(ValueSpec((width,), dtype) for width in widths)


def batch_of(specs: tuple[ValueSpec, ...], num_rows: int) -> tuple[Tensor, ...]:
    noise = example_rows(specs, num_rows, random=True)
    tokens = [torch.randint(0, spec.num_tokens or 1, (num_rows, *spec.shape)) for spec in specs]
    floating = [spec.dtype not in ("int64", "int32") for spec in specs]
    return tuple(x if real else t for x, t, real in zip(noise, tokens, floating, strict=True))


def assert_equals_module(bound: BoundCell, module: nn.Module, num_rows: int, tolerance: float = 1e-5) -> None:
    """call, and step after hoist, agree with the module in eval mode and leave their inputs alone."""
    module.eval()
    inputs = batch_of(bound.inputs, num_rows)
    before = [value.clone() for value in inputs]
    with torch.no_grad():
        if isinstance(module, nn.LSTMCell):
            wanted = module(inputs[0], (inputs[1], inputs[2]))
        else:
            wanted = flat_outputs(module(*(value.clone() for value in inputs)), "test")
    results = [bound.call(inputs)]
    if bound.num_step_inputs is not None:
        s = bound.num_step_inputs
        hoisted = bound.hoist(inputs[:s])
        assert tuple(tuple(h.shape[1:]) for h in hoisted) == tuple(spec.shape for spec in bound.hoisted)
        results.append(bound.step(hoisted, inputs[s:]))
    for outputs in results:
        assert len(outputs) == len(wanted)
        for output, want in zip(outputs, wanted, strict=True):
            assert output.dtype == want.dtype
            assert not output.requires_grad
            torch.testing.assert_close(output, want, rtol=tolerance, atol=tolerance)
    assert all(map(torch.equal, inputs, before))


class Words(nn.Module):
    """A word, embedded, through a stack of LSTM cells."""

    def __init__(self, num_tokens: int = 20, width: int = 8, hidden: int = 16, layers: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_tokens, width)
        self.cells = nn.ModuleList(nn.LSTMCell(width if i == 0 else hidden, hidden) for i in range(layers))

    def forward(self, token: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        x = self.embed(token)
        new: list[Tensor] = []
        for layer, cell in enumerate(self.cells):
            new.extend(cell(x, (state[2 * layer], state[2 * layer + 1])))
            x = new[-2]
        return tuple(new)


class Decoder(nn.Module):
    """Its own last word and a context in, the next word out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.cell = nn.GRUCell(8 + 6, 16)
        self.out = nn.Sequential(nn.Dropout(0.5), nn.Linear(16, 30))

    def forward(self, context: Tensor, word: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.cell(torch.cat([self.embed(word), context], 1), h)
        scores = self.out(h)
        return scores, scores.argmax(1), h


class Leaf(nn.Module):
    """The leaf of a TreeLSTM: a function of one word."""

    def __init__(self, num_tokens: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_tokens, 8)
        self.iou = nn.Linear(8, 48)

    def forward(self, token: Tensor) -> tuple[Tensor, Tensor]:
        i, o, u = self.iou(self.embed(token)).chunk(3, 1)
        c = torch.sigmoid(i) * torch.tanh(u)
        return torch.sigmoid(o) * torch.tanh(c), c


class Inner(nn.Module):
    """A TreeLSTM node over two children, its gates written one by one."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        names = [f"{gate}{side}" for gate in "iolru" for side in "lr"]
        self.gates = nn.ModuleDict({name: nn.Linear(hidden, hidden, bias=name[1] == "l") for name in names})

    def forward(self, hl: Tensor, cl: Tensor, hr: Tensor, cr: Tensor) -> tuple[Tensor, Tensor]:
        i, o, fl, fr, u = (self.gates[f"{g}l"](hl) + self.gates[f"{g}r"](hr) for g in "iolru")
        c = i.sigmoid() * u.tanh() + fl.sigmoid() * cl + fr.sigmoid() * cr
        return o.sigmoid() * c.tanh(), c


class Handwritten(nn.Module):
    """A recurrent cell out of linear layers, with an input that is also used bare and a state shaped by x."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Linear(16, 16)
        self.w = nn.Linear(6, 16, bias=False)
        self.register_buffer("scale", torch.rand(16))

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        shift = torch.ones(x.shape[0], 16) * self.scale.exp()
        new = torch.tanh(self.u(h) + self.w(x)) + shift * x.sum(1, keepdim=True)
        new = new.view(x.shape[0], 4, 4).transpose(1, 2).reshape(x.shape[0], 16)
        return torch.relu(self.u(new)) + x.mean(1, keepdim=True), new


class Untraceable(nn.Module):
    """Branches on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 8)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        if float(x.sum()) > 1e9:
            x = -x
        result: Tensor = self.cell(x, h)
        return result


cells = pytest.mark.parametrize(
    ("module", "inputs", "s"),
    [
        pytest.param(nn.LSTMCell(6, 16), rows(6, 16, 16), 1, id="lstm"),
        pytest.param(nn.LSTMCell(6, 16, bias=False), rows(6, 16, 16), 1, id="lstm-no-bias"),
        pytest.param(nn.LSTMCell(300, 300), rows(300, 300, 300), 1, id="lstm-packed"),
        pytest.param(nn.GRUCell(6, 16), rows(6, 16), 1, id="gru"),
        pytest.param(nn.GRUCell(300, 300, bias=False), rows(300, 300), 1, id="gru-packed"),
        pytest.param(nn.RNNCell(6, 16), rows(6, 16), 1, id="rnn"),
        pytest.param(nn.RNNCell(300, 300, nonlinearity="relu"), rows(300, 300), 1, id="rnn-relu-packed"),
        pytest.param(Words(), (TOKEN, *rows(16, 16)), 1, id="words"),
        pytest.param(Words(layers=3), (TOKEN, *rows(16, 16, 16, 16, 16, 16)), 1, id="stacked"),
        pytest.param(Decoder(), (*rows(6), TOKEN, *rows(16)), 1, id="decoder"),
        pytest.param(Leaf(), (TOKEN,), 1, id="leaf"),
        pytest.param(Inner(), rows(16, 16, 16, 16), None, id="tree"),
        pytest.param(Inner(300), rows(300, 300, 300, 300), None, id="tree-packed"),
        pytest.param(Handwritten(), rows(6, 16), 1, id="handwritten"),
        pytest.param(Untraceable(), rows(4, 8), 1, id="untraceable"),
        pytest.param(nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 7)), rows(300), None, id="mlp"),
    ],
)


@cells
def test_bound_cell_equals_its_module(module: nn.Module, inputs: tuple[ValueSpec, ...], s: int | None) -> None:
    torch.manual_seed(0)
    bound = bind(module, inputs, name="cell", num_step_inputs=s)
    for num_rows in (1, 2, 5, 33):
        assert_equals_module(bound, module, num_rows)


CELL_CLASSES = {"lstm": (nn.LSTMCell, 2), "gru": (nn.GRUCell, 1), "rnn": (nn.RNNCell, 1)}


@given(
    kind=st.sampled_from(sorted(CELL_CLASSES)),
    width=st.integers(1, 40),
    hidden=st.integers(1, 300),
    num_rows=st.integers(1, 40),
    bias=st.booleans(),
)
@example(kind="lstm", width=7, hidden=256, num_rows=64, bias=True)
@example(kind="gru", width=7, hidden=256, num_rows=64, bias=True)
@example(kind="rnn", width=7, hidden=257, num_rows=64, bias=True)
@settings(max_examples=6)
def test_any_size_of_recurrent_cell_agrees(kind: str, width: int, hidden: int, num_rows: int, bias: bool) -> None:
    cell_class, num_states = CELL_CLASSES[kind]
    module = cell_class(width, hidden, bias=bias)
    bound = bind(module, rows(width, *[hidden] * num_states), name=kind, num_step_inputs=1)
    assert_equals_module(bound, module, num_rows)


@pytest.mark.parametrize(("num_rows", "hidden", "kind"), covering([1, 32], [16, 256], sorted(CELL_CLASSES)))
def test_bfloat16_cells_are_as_close_to_float32_as_bfloat16_allows(kind: str, hidden: int, num_rows: int) -> None:
    torch.manual_seed(1)
    cell_class, num_states = CELL_CLASSES[kind]
    module = cell_class(8, hidden).to(torch.bfloat16)
    specs = rows(8, *[hidden] * num_states, dtype="bfloat16")
    bound = bind(module, specs, name=kind, num_step_inputs=1)
    inputs = batch_of(bound.inputs, num_rows)
    exact = cell_class(8, hidden)
    exact.load_state_dict(module.state_dict())
    x, *state = (value.float() for value in inputs)
    with torch.no_grad():
        wanted = exact(x, tuple(state)) if kind == "lstm" else (exact(x, state[0]),)
    for outputs in (bound.call(inputs), bound.step(bound.hoist(inputs[:1]), inputs[1:])):
        for output, want in zip(outputs, wanted, strict=True):
            assert output.dtype is torch.bfloat16
            torch.testing.assert_close(output.float(), want, rtol=0.02, atol=0.02)


def test_projection_of_words_is_a_table_and_tokens_are_handed_on() -> None:
    bound = bind(Words(num_tokens=20), (TOKEN, *rows(16, 16)), name="words", num_step_inputs=1)
    assert bound.inputs[0].num_tokens == 20
    assert bound.hoisted == (TOKEN,)
    assert any("folded" in note for note in bound.notes)
    tokens = torch.tensor([3, 19])
    assert torch.equal(bound.hoist((tokens,))[0], tokens)


def test_table_over_the_limit_is_not_made_and_the_projection_is_hoisted() -> None:
    module = Words(num_tokens=20)
    bound = bind(module, (TOKEN, *rows(16, 16)), name="words", num_step_inputs=1, fold_bytes=1000)
    assert any("not folded" in note for note in bound.notes)
    assert [spec.shape for spec in bound.hoisted] == [(64,)]
    assert_equals_module(bound, module, 5)


def test_leaf_becomes_two_tables() -> None:
    bound = bind(Leaf(num_tokens=50), (TOKEN,), name="leaf")
    assert bound.inputs == (ValueSpec((), "int64", 50),)
    assert bound.notes == ("what needs token alone folded into 0.0064 MB for 50 tokens",)


def test_bare_embedding_is_not_folded() -> None:
    bound = bind(nn.Embedding(9, 4), (TOKEN,), name="embedding")
    assert bound.inputs[0].num_tokens == 9
    assert bound.notes == ()


def test_decoder_folds_its_word_and_hoists_its_context() -> None:
    module = Decoder()
    bound = bind(module, (*rows(6), TOKEN, *rows(16)), name="decoder")
    once = bound.split(1)
    assert [spec.shape for spec in once.hoisted] == [(48,)]
    assert bound.split(1) is once
    assert once.identity == bound.identity


def test_untraceable_module_runs_as_it_is_and_says_why() -> None:
    bound = bind(Untraceable(), rows(4, 8), name="branchy", num_step_inputs=1)
    assert bound.notes[0].startswith("left as it is: torch.export failed")
    assert bound.hoisted == rows(4)


def test_module_that_writes_into_its_input_leaves_the_batch_alone() -> None:
    class Writer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(1).mul(2)

    assert_equals_module(bind(Writer(), rows(3), name="writer"), Writer(), 4)


def test_in_place_arithmetic_inside_a_module_is_traced() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 5)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            y += 1
            y[:, 2:].relu_()
            return y

    module = InPlace()
    bound = bind(module, rows(3), name="in place")
    assert not any("left as it is" in note for note in bound.notes)
    assert_equals_module(bound, module, 4)


def test_saved_graph_binds_to_the_same_type_as_its_module() -> None:
    module = nn.LSTMCell(4, 8)
    specs = rows(4, 8, 8)
    from_graph = bind(export_cell(module, specs), specs, name="saved", num_step_inputs=1)
    from_module = bind(module, specs, name="live", num_step_inputs=1)
    assert from_graph.identity == from_module.identity
    assert hash(from_graph.identity) == hash(from_module.identity)
    assert_equals_module(from_graph, module, 3)


def test_cells_are_one_type_exactly_when_graph_weights_and_rows_agree() -> None:
    module = nn.GRUCell(4, 8)
    twin = nn.GRUCell(4, 8)
    twin.load_state_dict(module.state_dict())
    one, same, other = (bind(m, rows(4, 8), name="gru").identity for m in (module, twin, nn.GRUCell(4, 8)))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != bind(nn.RNNCell(4, 8), rows(4, 8), name="rnn").identity
    relu, tanh = nn.ReLU(), nn.Tanh()
    assert bind(relu, rows(4), name="a").identity == bind(nn.ReLU(), rows(4), name="b").identity
    assert bind(relu, rows(4), name="a").identity != bind(relu, rows(5), name="b").identity
    assert bind(relu, rows(4), name="a").identity != bind(tanh, rows(4), name="b").identity
    branchy = Untraceable()
    assert bind(branchy, rows(4, 8), name="a").identity == bind(branchy, rows(4, 8), name="b").identity
    assert bind(branchy, rows(4, 8), name="a").identity != bind(Untraceable(), rows(4, 8), name="b").identity


def test_warm_up_runs_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, int]] = []

    def record(way: str) -> None:
        original = getattr(BoundCell, way)

        def recording(bound: BoundCell, *batches: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            outputs: tuple[Tensor, ...] = original(bound, *batches)
            ran.append((way, len(outputs[0])))
            return outputs

        monkeypatch.setattr(BoundCell, way, recording)

    for way in ("call", "step", "hoist"):
        record(way)
    bound = bind(Decoder(), (*rows(6), TOKEN, *rows(16)), name="decoder")
    bound.warm_up([1, 4])
    assert ran == [("call", 1), ("call", 4)]
    ran.clear()
    bound.split(1).warm_up([1, 4], [8])
    assert ran[:3] == [("step", 1), ("step", 4), ("hoist", 8)], "then its compiled call is measured"


def test_dropout_is_off_and_no_gradient_is_kept() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.9)).train()
    bound = bind(module, rows(4), name="dropout")
    x = batch_of(bound.inputs, 3)
    assert torch.equal(bound.call(x)[0], bound.call(x)[0])


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(0)


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.t()


class Raising(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("never")


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> str:
        return "nothing"


@pytest.mark.parametrize(
    ("module", "inputs", "s", "error", "message"),
    [
        (Mean(), rows(2), None, ShapeError, "Keep the batch in dimension 0"),
        (Square(), rows(4), None, ShapeError, "may not depend on the batch"),
        (Nothing(), rows(4), None, ModelError, "got str, expected a tensor"),
        (nn.Linear(4, 4), (), None, ModelError, "declares no inputs"),
        (
            nn.Linear(4, 4),
            rows(5),
            None,
            ShapeError,
            r"input 0: got rows of float32\[5\], expected float32\[4\]; a wrong",
        ),
        (nn.Linear(4, 4), rows(4, 4), None, ModelError, "takes 1 inputs, got 2"),
        (Raising(), rows(4), None, ModelError, "one value for each argument"),
        (nn.Linear(4, 4), (ValueSpec((4,), "float31"),), None, ModelError, "dtype 'float31' is not known"),
        (nn.GRUCell(4, 8), rows(4, 8), 3, ModelError, "got 3 step inputs, expected 0 to 2"),
        (nn.GRUCell(4, 8), rows(4, 8), 0, ModelError, "2 inputs are state but it returns 1"),
        (nn.Linear(4, 5), rows(4), 0, ModelError, "Return the next state as the last outputs"),
    ],
)
def test_wrong_cells_are_refused(
    module: nn.Module, inputs: tuple[ValueSpec, ...], s: int | None, error: type[ModelError], message: str
) -> None:
    with pytest.raises(error, match=message):
        bind(module, inputs, name="wrong", num_step_inputs=s)


def test_hoist_and_step_need_a_split() -> None:
    bound = bind(nn.GRUCell(4, 8), rows(4, 8), name="gru")
    with pytest.raises(ModelError, match="split"):
        bound.hoist(batch_of(rows(4), 2))


def test_tables_over_a_vocabulary_are_made_where_the_cell_runs() -> None:
    class Word(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 4)
            self.linear = nn.Linear(4, 3)

        def forward(self, word: Tensor) -> Tensor:
            return self.linear(self.embedding(word))

    there = torch.device("meta")  # a device whose tensors do not mix with the CPU's
    cell = bind(Word(), (ValueSpec((), "int64"),), name="word", device=there)
    assert any("10" in note for note in cell.notes)
    (made,) = cell.call((torch.zeros(5, dtype=torch.int64, device=there),))
    assert (made.device, made.shape) == (there, (5, 3))
