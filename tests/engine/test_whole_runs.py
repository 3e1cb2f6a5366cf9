"""Cells with a form for whole runs: every answer is that of the steps, and a form that gives others is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from checked_commands import CommandChecks
from engine_models import assert_balanced
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain_cells import PlainCell, resolved, same
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import batchmaker as bm
from batchmaker.compile import whole_run_trial as timing
from batchmaker.compile.whole_run_trial import WholeLengths, measured
from batchmaker.engine.unfolder import Unfolder
from batchmaker.errors import HandleError, InvalidRequestError, ModelError, OptionError, ShapeError
from batchmaker.graph.cell_graph import CellGraph
from batchmaker.graph.whole_runs import CONCURRENCIES, level_of
from batchmaker.lab.zoo.reference import PlainTypes, interpreted
from batchmaker.model import whole_runs as binding
from batchmaker.model.registry import CellRegistry
from batchmaker.model.unfolding import Unfolding
from batchmaker.policies.cellular import CellularPolicy
from batchmaker.policies.learned.policy import LearnedPolicy
from insides import schedulers

WIDTH, WORDS = 6, 11
NEVER: Final = 1 << 62


class Read(nn.Module):
    """word, h -> scores, h."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.step, self.out = nn.Embedding(WORDS, WIDTH), nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, word: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.step(self.embed(word), h)
        return self.out(h), h


class Mix(nn.Module):
    """A vector and a word at each step, h, c -> h, c."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.step = nn.Embedding(WORDS, WIDTH), nn.LSTMCell(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, word: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        h, c = self.step(torch.cat([x, self.embed(word)], 1), (h, c))
        return h, c


class Count(nn.Module):
    """word, h, a counter -> h, the counter: what a word does depends on its place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)

    def forward(self, word: Tensor, h: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        return 0.8 * h + self.embed(word) * (0.3 * place).cos()[:, None], place + 1


class Lm(nn.Module):
    """word, h -> the next word, h: runs over a prompt, and loops."""

    def __init__(self) -> None:
        super().__init__()
        self.read = Read()

    def forward(self, word: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        scores, h = self.read(word, h)
        return scores.argmax(-1), h


class Stepped(nn.Module):
    """Any step over whole runs. columns: how many inputs it takes at each step. kept: how an entry keeps its end."""

    def __init__(self, step: nn.Module, columns: int = 1) -> None:
        super().__init__()
        self.step, self.columns = step, columns

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        rows, number, state = inputs[: self.columns], inputs[self.columns], inputs[self.columns + 1 :]
        ends: tuple[Tensor, ...] = ()
        for step in range(rows[0].shape[1]):
            made = self.step(*[column[:, step] for column in rows], *state)
            state = made[len(made) - len(state) :]
            ends = tuple([self.kept(step < number, *pair) for pair in zip(made, ends or made, strict=True)])
        return ends

    @staticmethod
    def kept(goes_on: Tensor, new: Tensor, old: Tensor) -> Tensor:
        return torch.where(goes_on.view(-1, *[1] * (new.dim() - 1)), new, old)


def _modules() -> dict[str, nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return {"read": Read().eval(), "mix": Mix().eval(), "count": Count().eval(), "lm": Lm().eval()}


MODULES: Final = _modules()
COLUMNS: Final = {"read": 1, "mix": 2, "count": 1, "lm": 1}
STATES: Final = {"read": (WIDTH,), "mix": (WIDTH, WIDTH), "count": (WIDTH, ()), "lm": (WIDTH,)}


class Everything(bm.Model):
    """A request of words, and what is done with it. Each cell has a form for whole runs of `least` steps or more."""

    def __init__(self, use: Callable[[Any, Any], Any], least: int | None = 1, **options: Any) -> None:
        self.use = use
        for name, module in MODULES.items():
            whole = Stepped(module, COLUMNS[name])
            setattr(self, name, bm.Cell(module, whole=whole, whole_from=least, **options))

    def unfold(self, x: Any) -> Any:
        return self.use(self, x)


class Plainly:
    """The same cells in plain PyTorch, step by step."""

    def __init__(self) -> None:
        for name, module in MODULES.items():
            setattr(self, name, PlainCell(module, STATES[name]))


def words(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(1000 * length + seed).integers(0, WORDS, length).tolist()


def vectors(x: Any) -> list[list[float]]:
    return [[0.1 * word + 0.01 * k for k in range(WIDTH)] for word in x]


REQUESTS: Final = [words(length, seed) for seed in range(3) for length in (1, 2, 3, 4, 5, 9, 17, 40)]

USES: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "its end": lambda m, x: m.read.run(x),
    "its end, from a state": lambda m, x: m.read.run(x, ([0.3] * WIDTH,)),
    "two inputs at each step, of data": lambda m, x: m.mix.run((vectors(x), x[::-1])),
    "from zeros in one part of the state": lambda m, x: m.mix.run((vectors(x), x), (m.read.run(x)[1], None)),
    "one run after another": lambda m, x: m.read.run(x[::-1], (m.read.run(x)[1],)),
    "a run over the steps of a run": lambda m, x: m.mix.run((m.read.run(x)[1].steps, x)),
    "a run over steps in reverse": lambda m, x: m.mix.run((m.read.run(x)[1].steps[::-1], x)),
    "a run over the nodes of a map": lambda m, x: m.mix.run((m.count.map(x, vectors(x), x)[0], x)),
    "a run over single calls": lambda m, x: m.mix.run(([m.read(word, [0.1] * WIDTH)[1] for word in x], x)),
    "its steps, asked for late": lambda m, x: (
        (y := m.read.run(x)), m.read(x[0], y[1]), m.read.run(x[::-1]), y[0].steps
    )[1:],
    "an integer in the state": lambda m, x: m.count.run(x, ([0.1] * WIDTH, 2)),
    "an integer in the state from a run": lambda m, x: m.count.run(x, m.count.run(x, ([0.1] * WIDTH, 0))),
    "a loop goes on": lambda m, x: m.read.run(x, (m.lm.loop((x[0], m.read.run(x)[1]), max_steps=3)[1],)),
}  # fmt: skip


def checked(model: bm.Model | dict[str, bm.Model], policy: str = "cellular", **options: Any) -> tuple[bm.Engine, Any]:
    """Return an engine whose commands and state are checked at every turn, and what checks them."""
    engine = bm.Engine(model, policy, **{"threads": 1, **options})
    checks = [CommandChecks(core, every=1) for core in schedulers(engine)]
    for driver, each in zip(engine.drivers, checks, strict=True):
        driver.record = each
    return engine, checks


def assert_right(engine: bm.Engine, checks: Any) -> None:
    assert not [wrong for each in checks for wrong in each.wrong]
    assert_balanced(engine)


def whole_tasks(engine: bm.Engine) -> int:
    """How many batches of whole runs have run."""
    return sum(cell.one_by_one for cell in engine.explain().cells if cell.used == "whole runs")


def assert_as_alone(use: Callable[[Any, Any], Any], policy: str = "cellular", **options: Any) -> None:
    engine, checks = checked(Everything(use), policy, **options)
    with engine:
        answers = engine.map(REQUESTS, progress=False)
        assert whole_tasks(engine) > 0
    assert_right(engine, checks)
    plain = Plainly()
    for request, answer in zip(REQUESTS, answers, strict=True):
        wanted = resolved(use(plain, request))
        assert same(answer, wanted, 1e-4), f"{len(request)} words: {answer}, alone {wanted}"


# --- the same answers ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", USES)
def test_whole_runs_give_what_their_steps_give(name: str) -> None:
    assert_as_alone(USES[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_whole_runs_keep_the_dtype(dtype: torch.dtype) -> None:
    class Reads(bm.Model):
        def __init__(self) -> None:
            step = Mix().to(dtype)
            self.mix = bm.Cell(step, whole=Stepped(step, 2), whole_from=4)

        def unfold(self, x: Any) -> Any:
            return self.mix.run((vectors(x), x))

    model, x = Reads(), words(9)
    with bm.Engine(model, threads=1) as engine:
        h, c = engine.submit(x).result()
        assert whole_tasks(engine) == 1
    alone = PlainCell(model.mix.module, (WIDTH, WIDTH))
    rows = torch.tensor(vectors(x), dtype=dtype)
    wanted = resolved(alone.run((list(rows), x), tuple(torch.zeros(2, WIDTH, dtype=dtype))))
    assert same((h, c), wanted, 5e-2 if dtype is torch.bfloat16 else 1e-9)


@pytest.mark.parametrize(
    "policy",
    [
        "auto",
        "cellular:max_steps=1",
        "agenda",
        *[pytest.param(each, marks=pytest.mark.slow) for each in ("lazy", "depth", "sufficient")],
    ],
)
def test_every_policy_gives_the_same(policy: str) -> None:
    def use(m: Any, x: Any) -> Any:
        first = m.read.run(x)[1]
        return m.mix.run((first.steps, x), (m.read.run(x[::-1])[1], None)), m.read.run(x, (first,))

    assert_as_alone(use, policy)


def test_several_workers_share_the_forms() -> None:
    assert_as_alone(USES["one run after another"], workers=2)


def test_several_models_have_forms_of_their_own() -> None:
    use = USES["its end"]
    engine, checks = checked({"one": Everything(use), "other": Everything(use, 3)})
    with engine:
        answers = [engine.submit(x, model=name) for x in REQUESTS for name in ("one", "other")]
        for x, one, other in zip(REQUESTS, answers[::2], answers[1::2], strict=True):
            assert same(one.result(), other.result(), 1e-4), x
        assert "one/read whole" in [cell.cell for cell in engine.explain().cells]
    assert_right(engine, checks)


MOVES: Final = st.lists(
    st.tuples(
        st.sampled_from(["read", "steps", "mix", "over", "count", "call", "again"]),
        st.integers(0, 3),
        st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=12),
    ),
    min_size=1,
    max_size=6,
)


def played(m: Any, moves: Sequence[tuple[str, int, list[int]]]) -> Any:
    """Do what a plan says. States are chosen among those so far; results are the ends of all runs, and some steps."""
    states, sequences, results = [m.read.run([1, 2])[1]], [], list[Any]()
    for kind, place, x in moves:
        h = states[place % len(states)]
        if kind == "read":
            made = m.read.run(x, (h,))
        elif kind == "steps":
            made = m.read.run(x, (h,))
            sequences.append(made[1].steps)
            results.append(made[0].steps)
        elif kind == "mix":
            made = m.mix.run((vectors(x), x), (h, None))
        elif kind == "over" and sequences:
            over = sequences[place % len(sequences)]
            made = m.mix.run((over, [place] * len(over)), (None, h))
        elif kind == "count":
            made = m.count.run(x, (h, place))[:1]
        elif kind == "call":
            made = m.read(x[0], h)
        else:
            made = m.read.run(x)
        states.append(made[-1])
        results.append(list(made))
    return results


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    plans=st.lists(MOVES, min_size=1, max_size=5),
    least=st.sampled_from([1, 2, 5]),
    policy=st.sampled_from(["auto", "cellular", "cellular:max_steps=1", "lazy"]),
)
def test_random_requests_equal_plain_pytorch_one_by_one(plans: Any, least: int, policy: str) -> None:
    engine, checks = checked(Everything(played, least), policy)
    with engine:
        answers = [(plan, engine.submit(plan)) for plan in plans for _ in range(3)]
        for plan, answer in answers:
            assert same(answer.result(120), resolved(played(Plainly(), plan)), 1e-4)
    assert_right(engine, checks)


def test_torchs_own_layer_is_a_whole_form() -> None:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = nn.LSTMCell(WIDTH, WIDTH)

        def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            h, c = self.step(x, (h, c))
            return h, c

    class Layer(nn.Module):
        def __init__(self, step: nn.LSTMCell) -> None:
            super().__init__()
            self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                setattr(self.layer, f"{name}_l0", getattr(step, name))

        def forward(self, x: Tensor, number: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            packed = pack_padded_sequence(x, number, batch_first=True, enforce_sorted=False)
            _, (h, c) = self.layer(packed, (h[None], c[None]))
            return h[0], c[0]

    class Reads(bm.Model):
        def __init__(self, **options: Any) -> None:
            self.cell = bm.Cell(step, **options)

        def unfold(self, x: Any) -> Any:
            return self.cell.run(x)

    step = Step()
    requests = [torch.randn(length, WIDTH) for length in (1, 2, 7, 30, 31)]
    with bm.Engine(Reads(whole=Layer(step.step), whole_from=1), threads=1) as engine, bm.Engine(Reads()) as plain:
        for _ in range(2):
            answers = engine.map(requests, progress=False)
            assert all(map(lambda *pair: same(*pair, 1e-5), answers, plain.map(requests, progress=False)))
        assert whole_tasks(engine) > 0


# --- which runs ---------------------------------------------------------------------------------------------------


def graph_of(use: Callable[[Any, Any], Any], x: list[int], least: int = 1, level: int = 0) -> tuple[CellGraph, Any]:
    registry = CellRegistry(only_steps="")
    unfolding = Unfolding(Everything(use, least), registry, x, level=level)
    unfolding.start()
    return unfolding.graph, registry


@pytest.mark.parametrize("length", [3, 4, 5, 6])
def test_runs_from_a_length_on_are_one_node(length: int) -> None:
    graph, registry = graph_of(USES["its end"], words(length), 5)
    kinds = [registry.types[kind].name for block in graph.blocks for kind in block.types.tolist()]
    assert [run.length for run in graph.runs] == ([length] if length < 5 else [])
    assert kinds == ([] if length < 5 else ["copy int64[]"] * (length - 1) + ["read whole"])
    assert graph.num_nodes == length


def test_a_run_whose_steps_are_read_is_steps() -> None:
    for use in (
        lambda m, x: m.read.run(x)[0].steps,
        lambda m, x: m.mix.run((m.read.run(x)[1].steps, x))[0].steps,
        lambda m, x: m.read.run(x)[1].at(1),
        USES["its steps, asked for late"],
    ):
        graph, _ = graph_of(use, words(9))
        assert graph.runs


def test_a_function_that_waits_asks_for_steps_before_its_yield() -> None:
    class Waits(bm.Model):
        def __init__(self) -> None:
            self.read = bm.Cell(MODULES["read"], whole=Stepped(MODULES["read"]), whole_from=1)

        def unfold(self, x: Any) -> Any:
            scores, h = self.read.run(x[1:])
            steps = h.steps if x[0] == 1 else None
            yield h
            return (steps or h.steps), scores

    with bm.Engine(Waits(), threads=1) as engine:
        steps, _ = engine.submit([1, 2, 3, 4]).result()
        assert same(steps, resolved(Plainly().read.run([2, 3, 4])[1].steps), 1e-4)
        with pytest.raises(ModelError, match=r"take `.steps` before the next `yield`"):
            engine.submit([0, 2, 3, 4]).result()
        assert same(engine.submit([1, 5]).result()[0], resolved(Plainly().read.run([5])[1].steps), 1e-4)


@pytest.mark.parametrize("chunks", [[[3, 4, 5]], [[1], [2, 3], [4]], [list(range(9)), [1], [2] * 17]])
def test_chunks_of_a_sequence_are_whole_runs_from_the_kept_state(chunks: list[list[int]]) -> None:
    class Listens(bm.Model):
        def __init__(self) -> None:
            self.mix = bm.Cell(MODULES["mix"], whole=Stepped(MODULES["mix"], 2), whole_from=1)

        def unfold(self, x: Any) -> Any:
            return self.mix.run((vectors(x), x))

        def unfold_chunk(self, x: Any, state: Any) -> Any:
            state = self.mix.run((vectors(x), x), state)
            return state[0], state

    engine, checks = checked(Listens())
    with engine:
        for _ in range(3):  # the third time from templates
            with engine.open_sequence() as sequence:
                heard: list[int] = []
                for chunk in chunks:
                    heard += chunk
                    h, _ = resolved(Plainly().mix.run((vectors(heard), heard)))
                    assert same(sequence.submit(chunk).result(), h, 1e-4)
        assert whole_tasks(engine) > 0
    assert_right(engine, checks)


def test_runs_beside_decisions_are_whole_and_runs_inside_them_are_steps() -> None:
    class Chooses(bm.Model):
        def __init__(self) -> None:
            self.read = bm.Cell(MODULES["read"], whole=Stepped(MODULES["read"]), whole_from=1)
            self.first = bm.Cell(First())

        def unfold(self, x: Any) -> Any:
            _, h = self.read.run(x)
            return bm.cond(self.first(h), lambda: self.read.run(x[::-1], h)[1], lambda: h), self.read.run(x, h)[1]

    class First(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return h[:, 0] > 0

    engine, checks = checked(Chooses())
    with engine:
        answers = engine.map(REQUESTS, progress=False)
        assert whole_tasks(engine) > 0
    assert_right(engine, checks)
    for x, (chosen, end) in zip(REQUESTS, answers, strict=True):
        _, h = Plainly().read.run(x)
        wanted = Plainly().read.run(x[::-1], (h,))[1] if h.row[0] > 0 else h
        assert same(chosen, wanted.row, 1e-4)
        assert same(end, Plainly().read.run(x, (h,))[1].row, 1e-4)


def test_cancelled_requests_give_everything_back() -> None:
    engine, checks = checked(Everything(USES["one run after another"]))
    with engine:
        answers = [engine.submit(words(40, seed)) for seed in range(30)]
        for answer in answers[::2]:
            answer.cancel()
        for answer in answers:
            answer.exception()
    assert_right(engine, checks)


def test_a_token_that_the_step_does_not_know_fails_its_request_alone() -> None:
    with bm.Engine(Everything(USES["its end"]), threads=1) as engine:
        for _ in range(3):  # unfolded, and from a template
            answers = [engine.submit(x) for x in ([1, 2, 3, 4], [1, WORDS, 3, 4], [1, 2, 3, WORDS])]
            assert answers[0].exception() is None
            for answer in answers[1:]:
                with pytest.raises(InvalidRequestError, match=str(WORDS)):
                    answer.result()


def test_a_deterministic_engine_takes_steps_and_says_so() -> None:
    with bm.Engine(Everything(USES["its end"]), deterministic=True) as engine:
        engine.submit(words(9)).result()
        (cell,) = engine.explain().cells
        assert cell.cell == "read"
        assert any("whole= is not used: deterministic=True" in note for note in cell.notes)


def test_a_policy_that_knows_steps_alone_gets_steps() -> None:
    class Knows(CellularPolicy):
        knows_steps_only = True

    assert LearnedPolicy.knows_steps_only
    with bm.Engine(Everything(USES["its end"]), Knows()) as engine:
        engine.submit(words(9)).result()
        (cell,) = engine.explain().cells
        assert any("whole= is not used: policy" in note for note in cell.notes)


def test_the_interpreted_reference_and_simulations_take_steps() -> None:
    model, x = Everything(USES["one run after another"]), words(9)
    assert same(interpreted(model, x), resolved(model.use(Plainly(), x)), 1e-4)
    for types in (PlainTypes(), CellRegistry()):
        unfolding = Unfolding(model, types, x)
        unfolding.start()
        assert [run.length for run in unfolding.graph.runs] == [9, 9]


def test_rows_that_run_one_by_one_have_whole_forms_too() -> None:
    model = Everything(USES["its end"], independent_rows=False)
    with bm.Engine(model, threads=1) as engine:
        for x, answer in zip(REQUESTS, engine.map(REQUESTS, progress=False), strict=True):
            assert same(answer, resolved(Plainly().read.run(x)), 1e-4)
        assert whole_tasks(engine) == len(REQUESTS)


def test_a_request_that_overflows_does_not_decide_on_the_form() -> None:
    def use(m: Any, x: Any) -> Any:
        return m.mix.run(([[float(x[0])] * WIDTH] * len(x), x[1:] + x[:1]))

    with bm.Engine(Everything(use), threads=1) as engine:
        engine.submit([float("inf"), 1, 2]).exception()
        x = [1, 2, 3, 4]
        assert same(engine.submit(x).result(), resolved(use(Plainly(), x)), 1e-4)
        assert whole_tasks(engine) > 0


def test_a_model_with_a_whole_form_is_saved_with_the_steps_alone(tmp_path: Path) -> None:
    bm.save(Generates(whole=Stepped(MODULES["lm"]), whole_from=1), tmp_path / "model", example_request=words(3))
    model = bm.load(tmp_path / "model")
    with bm.Engine(model, threads=1) as engine:
        for length in (1, 3, 8):
            word, said, end = engine.submit(words(length)).result()
            assert same((word, said, end), alone(words(length)), 1e-4)
        assert whole_tasks(engine) == 0


# --- chosen by time -----------------------------------------------------------------------------------------------


def timed(
    monkeypatch: pytest.MonkeyPatch, step_s: dict[int, float], whole_s: Callable[[int, int], float]
) -> WholeLengths:
    """What is chosen if a step of a batch takes so long, and whole runs by batch and length."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(timing, "_step_s", lambda cell, batch: step_s[batch])
    monkeypatch.setattr(timing, "_rows_of", lambda cell, batch, length: asked.append((batch, length)))
    monkeypatch.setattr(timing, "least_s", lambda calls: [whole_s(*asked[-1])])
    return measured(None, None, 256)  # type: ignore[arg-type]


def test_the_form_is_chosen_by_length_and_by_how_many_are_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {1: 1e-3, 4: 1.2e-3, 16: 2e-3}
    found = timed(monkeypatch, steps, lambda batch, length: 3e-3 * batch + 1e-5 * length * batch)
    assert found.least == (4, 32, 64)
    assert "from 4 steps on alone" in found.said
    assert timed(monkeypatch, steps, lambda batch, length: 1.0).least == (NEVER,) * 3
    assert timed(monkeypatch, steps, lambda batch, length: 1e-6).least == (2, 2, 2)


def test_levels_of_concurrency_are_numbers_of_requests_in_flight() -> None:
    assert [level_of(n) for n in (1, 2, 4, 5, 16, 17, 1000)] == [0, 1, 1, 2, 2, 2, 2]
    assert len(CONCURRENCIES) == 3


def test_requests_alone_and_many_take_the_form_that_is_faster_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "measured", lambda steps, whole, most: WholeLengths((2, NEVER, NEVER), "said"))
    engine, checks = checked(Everything(USES["its end"], None))
    x = words(9)
    with engine:
        for _ in range(4):
            engine.submit(x).result()
        alone = whole_tasks(engine)
        assert alone == 4
        began = []
        before = Unfolder.begin

        def begin(self: Unfolder, tickets: Any, events: Any, settle: Any, in_flight: int, *others: Any) -> Any:
            began.append((sum(ticket.num_requests for ticket in tickets), in_flight))
            return before(self, tickets, events, settle, in_flight, *others)

        monkeypatch.setattr(Unfolder, "begin", begin)
        answers = engine.map([x] * 40, progress=False)
        not_alone = sum(count for count, others in began if count + others > 1)
        assert not_alone > 0
        assert whole_tasks(engine) - alone <= sum(count for count, others in began if count + others == 1)
    assert_right(engine, checks)
    assert all(same(answer, resolved(Plainly().read.run(x)), 1e-4) for answer in answers)


def test_the_engine_says_from_which_length_on_runs_are_one_node() -> None:
    with bm.Engine(Everything(USES["its end"], 7), threads=1) as engine:
        engine.submit(words(9)).result()
        cells = {cell.cell: cell for cell in engine.explain().cells}
    assert any("one node from 7 steps on" in note for note in cells["read"].notes)
    assert cells["read whole"].used == "whole runs"


def test_what_is_measured_serves() -> None:
    with bm.Engine(Everything(USES["its end"], None), threads=1) as engine:
        answers = engine.map(REQUESTS, progress=False)
        assert any("runs are" in note for cell in engine.explain().cells for note in cell.notes)
    assert all(same(a, resolved(Plainly().read.run(x)), 1e-4) for a, x in zip(answers, REQUESTS, strict=True))


# --- what is refused ----------------------------------------------------------------------------------------------


class NoState(Stepped):
    """Begins from zeros, whatever the state is."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return super().forward(*inputs[:2], *[torch.zeros_like(part) for part in inputs[2:]])


class OneShort(Stepped):
    """Leaves out the last step."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return super().forward(inputs[0], (inputs[1] - 1).clamp(min=1), *inputs[2:])


class LongOnly(Stepped):
    """Is wrong for long runs."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return super().forward(inputs[0], inputs[1].clamp(max=4), *inputs[2:])


class LostBetweenBlocks(Stepped):
    """Goes over a run in blocks of 64, and forgets the state between them."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        begin = (inputs[1] - 1) // 64 * 64
        places = (begin[:, None] + torch.arange(64)).clamp(max=inputs[0].shape[1] - 1)
        state = [torch.where(begin[:, None] > 0, 0.0, part) for part in inputs[2:]]
        return super().forward(inputs[0].gather(1, places), inputs[1] - begin, *state)


class Unmasked(Stepped):
    """Goes over all rows."""

    @staticmethod
    def kept(goes_on: Tensor, new: Tensor, old: Tensor) -> Tensor:
        return new


class OfTheFirst(Stepped):
    """Takes the number of the first entry for all."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return super().forward(inputs[0], inputs[1][:1].expand_as(inputs[1]), *inputs[2:])


class SumsAll(Stepped):
    """Adds something of all rows, which is nothing where the others are zeros."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        scores, h = super().forward(*inputs)
        after = torch.arange(inputs[0].shape[1]) >= inputs[1][:, None]
        return scores + (inputs[0] * after).sum(1)[:, None], h


class Divides(Stepped):
    """Divides by the room."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        scores, h = super().forward(*inputs)
        return scores * inputs[1][:, None] / inputs[0].shape[1], h


class Swapped(Stepped):
    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return super().forward(*inputs)[::-1]


class StateOnly(Stepped):
    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return super().forward(*inputs)[1:]


def refusal(whole: nn.Module, step: nn.Module | None = None) -> ModelError:
    class Reads(bm.Model):
        def __init__(self) -> None:
            self.reader = bm.Cell(MODULES["read"] if step is None else step, whole=whole, whole_from=1)

        def unfold(self, x: Any) -> Any:
            return self.reader.run(x, ([0.0] * WIDTH,))

    with bm.Engine(Reads(), threads=1) as engine:
        refused, again = (engine.submit([1, 2, 3]).exception() for _ in range(2))
    assert isinstance(refused, ModelError)
    assert str(again) == str(refused)
    return refused


@pytest.mark.parametrize("kind", [NoState, OneShort, LongOnly, pytest.param(LostBetweenBlocks, marks=pytest.mark.slow)])
def test_a_form_that_gives_something_else_is_refused(kind: type[Stepped]) -> None:
    said = str(refusal(kind(MODULES["read"])))
    assert "cell 'reader', output 0: whole= gives something else than its steps" in said


@pytest.mark.parametrize("kind", [Unmasked, OfTheFirst, Divides])
def test_a_form_that_looks_beyond_its_number_is_refused(kind: type[Stepped]) -> None:
    said = str(refusal(kind(MODULES["read"])))
    assert "cell 'reader', output 0: whole= gives something else than its steps: for a run of" in said
    assert "in a batch of 8 with runs of other lengths" in said


def test_a_form_that_looks_at_what_is_after_its_number_is_refused() -> None:
    said = str(refusal(SumsAll(MODULES["read"])))
    assert "cell 'reader': what whole= returns depends on rows after the number" in said


@pytest.mark.parametrize("kind", [Swapped, StateOnly])
def test_a_form_that_returns_other_rows_is_refused(kind: type[Stepped]) -> None:
    error = refusal(kind(MODULES["read"]))
    assert isinstance(error, ShapeError)
    assert "cell 'reader': a step of 1 rows returns (float32[1, 11], float32[1, 6]), whole= returns (" in str(error)


class LongRaises(Stepped):
    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if inputs[0].shape[1] > 9:
            raise ValueError("too long")
        return super().forward(*inputs)


def test_a_form_that_raises_for_some_lengths_is_refused() -> None:
    assert "cell 'reader': whole= raised ValueError: too long for runs of" in str(refusal(LongRaises(MODULES["read"])))


def test_a_cell_that_draws_random_numbers_has_no_whole_form() -> None:
    class Draws(nn.Module):
        def forward(self, word: Tensor, h: Tensor) -> Tensor:
            return h + torch.rand_like(h) + word[:, None]

    class Any1(nn.Module):
        def forward(self, rows: Tensor, number: Tensor, h: Tensor) -> Tensor:
            return h + number[:, None]

    assert "draws random numbers" in str(refusal(Any1(), Draws()))


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"whole": 3}, ModelError, "takes an nn.Module, got int"),
        ({"whole_from": 3}, OptionError, "is for a cell with whole="),
        ({"whole": Stepped(MODULES["read"]), "whole_from": 0}, OptionError, "at least 1, got 0"),
        ({"whole": Stepped(MODULES["read"]), "memory": "word"}, OptionError, "is for cells without memory="),
    ],
)
def test_options_that_do_not_fit_are_refused(options: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        bm.Cell(MODULES["read"], **options)


# --- one cell that runs over a prompt and loops ----------------------------------------------------------------------


class Generates(bm.Model):
    """prompt: what is done with the words of a request; by default they are run over."""

    def __init__(self, prompt: Callable[[Any, Any], Any] | None = None, **options: Any) -> None:
        self.lm = bm.Cell(MODULES["lm"], **options)
        if prompt is not None:
            self.prompt = prompt

    def prompt(self, lm: Any, x: Any) -> Any:
        return lm.run(x)

    def unfold(self, x: Any) -> Any:
        word, h = self.prompt(self.lm, x)
        words, end = self.lm.loop((word, h), max_steps=3)
        return word, words.steps, end


def alone(x: list[int]) -> Any:
    lm = Plainly().lm
    word, h = lm.run(x)
    said, end = lm.loop((word, h), max_steps=3)
    return resolved((word, said.steps, end))


@pytest.mark.parametrize("options", [{}, {"whole": Stepped(MODULES["lm"]), "whole_from": 1}])
def test_one_cell_runs_over_a_prompt_and_loops(options: Any) -> None:
    def but_the_last(lm: Any, x: Any) -> Any:
        h = lm.run(x[:-1], torch.zeros(WIDTH))[-1]  # of a prompt of one word, the run is empty: h is its init
        return lm(x[-1], h)

    for way in (None, but_the_last):
        with bm.Engine(Generates(way, **options), threads=1) as engine:
            for x in ([3], [3, 4], [5, 6, 7, 8]):
                assert same(engine.submit(x).result(), alone(x), 1e-4), x


@pytest.mark.parametrize("x", [[3], [3, 4]])
def test_a_tuple_of_outputs_in_place_of_one_says_what_to_write(x: list[int]) -> None:
    def as_a_tuple(lm: Any, x: Any) -> Any:
        h = lm.run(x[:-1], torch.zeros(WIDTH))
        return lm(x[-1], h)

    with bm.Engine(Generates(as_a_tuple), threads=1) as engine, pytest.raises(HandleError) as refused:
        engine.submit(x).result()
    assert "got the 2 outputs of a call or run, a tuple, expected one of them" in str(refused.value)
    assert "`cell.run(...)[-1]`" in str(refused.value)


def test_the_word_of_an_empty_run_is_missing_only_if_it_is_read() -> None:
    model = Generates(lambda lm, x: lm.run([], torch.zeros(WIDTH)))
    with bm.Engine(model, threads=1) as engine, pytest.raises(InvalidRequestError, match="run over an empty sequence"):
        engine.submit([3]).result()
