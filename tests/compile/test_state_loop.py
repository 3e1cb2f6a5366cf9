"""Chains with any state, many steps in one compiled call, give what the module gives, step by step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.compile.binding import BoundCell, bind
from batchmaker.compile.loops import ChainLoop
from batchmaker.compile.passes.interpreter import is_available
from batchmaker.compile.state_loop import StateChoice, StateLoop
from batchmaker.graph.spec import ValueSpec
from batchmaker.kernels.cpu.greedy import GreedyLoop
from insides import state_loop

pytestmark = pytest.mark.skipif(not is_available(), reason="needs compiled loops")

WIDTH, WORDS, MEMORY = 16, 12, 5
Ran = list[tuple[int, int]]


def spec(dtype: str, *shape: int) -> ValueSpec:
    return ValueSpec(shape, dtype)


def bound(module: nn.Module, *inputs: ValueSpec, num_step_inputs: int = 0) -> BoundCell:
    torch.manual_seed(0)
    for weight in module.parameters():
        nn.init.normal_(weight, std=0.5)
    return bind(module.eval(), inputs, name="cell", num_step_inputs=num_step_inputs)


def loop_of(cell: BoundCell) -> StateLoop | None:
    return state_loop(cell)


# --- one step ---------------------------------------------------------------------------------------------------------


class Numbers(nn.Module):
    """Operations on integers, floats, bools and masks that are done without torch."""

    def forward(self, i: Tensor, j: Tensor, x: Tensor, y: Tensor, on: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        count = (i + 1) % 7 - j // 3 * 2
        bounded = torch.maximum(i, j).clamp(min=-2, max=4) - torch.minimum(i, -j).abs()
        ratio = x / y + i * 0.5 - (2 - x) % 1.5
        roots = x.abs().sqrt() + x.exp().tanh() * y.sigmoid() - (y.abs() + 1).log()
        larger = torch.maximum(x, y) - torch.minimum(x, -y) + (i**2).relu() - x.square().expm1().log1p()
        curves = x.sin() + y.cos() - torch.erf(x) * (y.abs() + 1).rsqrt() + x.floor() - y.ceil() + 1 / (x.abs() + 1)
        bits = ((i << 3) & 21 | 64 ^ 5) ^ (j >> 2)
        flags = (on | (i == 3)) & ~(j > i) ^ (x <= y)
        others = torch.logical_or(on, i >= j) & torch.logical_not(torch.logical_and(x != y, i.bool()))
        chosen = torch.where(on, i, 0) + torch.where(i < j, 5, j)
        kept = torch.where(flags, x, float("nan")) * others.to(x.dtype) + on.float()
        places = torch.arange(4)
        mask = (places == i[:, None] % 4) | (s > 0.5)
        scores = torch.where(mask, s / (x.abs()[:, None] + 1), -1e9).masked_fill(s < -1, float("-inf"))
        best = scores.argmax(-1)
        wide = torch.cat([s[:, 1:3] * 2, x[:, None], x[:, None].expand(-1, 2)], 1) - s[:, 3:]
        spread = s[:, 2] + torch.zeros_like(x) + torch.tensor([0.5], dtype=torch.float64).float() * x
        return (
            count, bounded, ratio, roots, larger, flags, others, chosen, kept, mask, scores, best, wide, spread,
            curves, bits, x.to(torch.float64) / 3, x.long() * 2, scores.argmax(-1, keepdim=True), i + 1, j, x, y, ~on,
            s - 0.25,
        )  # fmt: skip


def numbers(count: int) -> tuple[Tensor, ...]:
    made = torch.Generator().manual_seed(count)
    i, j = (torch.randint(-9, 9, (count,), generator=made) for _ in range(2))
    x, y = (torch.randn(count, generator=made) * 3 for _ in range(2))
    s = torch.randn(count, 4, generator=made)
    return i, j, x, y, torch.rand(count, generator=made) < 0.5, s


NUMBERS = (spec("int64"), spec("int64"), spec("float32"), spec("float32"), spec("bool"), spec("float32", 4))


@cache
def loop_of_numbers() -> StateLoop:
    loop = loop_of(bound(Numbers(), *NUMBERS))
    assert loop is not None
    return loop


@pytest.mark.parametrize("count", [1, 2, 64, 65, 300])
def test_operations_on_numbers_are_those_of_torch(count: int) -> None:
    module, loop = Numbers(), loop_of_numbers()
    assert loop.num_calls == 0
    given = numbers(count)
    for output, (mine, right) in enumerate(zip(loop.call(given, specs_of(module)), module(*given), strict=True)):
        assert mine.dtype == right.dtype
        torch.testing.assert_close(
            mine, right, rtol=2e-7 if right.is_floating_point() else 0, atol=2e-6, equal_nan=True, msg=str(output)
        )


def test_workers_that_ask_for_steps_of_different_sizes_at_once_each_have_an_answer() -> None:
    """A trial for fewer rows that waited for another one must not take its place."""
    trial_is_on, other = threading.Event(), []

    def example(count: int) -> tuple[Tensor, ...]:
        if not trial_is_on.is_set():
            trial_is_on.set()
            other[0].start()
            other[0].join(0.05)
        return numbers(count)

    choice = StateChoice(loop_of_numbers(), Numbers(), example)
    other.append(threading.Thread(target=choice.fastest, args=(2,)))
    choice.fastest(70)
    other[0].join()
    assert len(choice.faster) == 71


def specs_of(module: nn.Module) -> tuple[ValueSpec, ...]:
    return tuple([
        ValueSpec(tuple(made.shape[1:]), str(made.dtype).removeprefix("torch.")) for made in module(*numbers(2))
    ])  # fmt: skip


def test_nan_infinity_ties_and_large_integers_are_those_of_torch() -> None:
    module, loop = Numbers(), loop_of_numbers()
    i, j, x, y, on, s = numbers(8)
    x[:4], y[2:6] = (
        torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0]),
        torch.tensor([torch.nan, 0.0, -0.0, torch.inf]),
    )
    i[:2] = torch.tensor([2**62, -(2**62)])
    s[:] = 0.0  # every score the same: the first is the greatest
    s[3, 2] = torch.nan
    given = (i, j, x, y, on, s)
    for output, (mine, right) in enumerate(zip(loop.call(given, specs_of(module)), module(*given), strict=True)):
        if output != 17:  # the integer of what is not finite is not defined
            torch.testing.assert_close(mine, right, rtol=2e-7 if right.is_floating_point() else 0, atol=2e-6,
                                       equal_nan=True, msg=str(output))  # fmt: skip


class Shifted(nn.Module):
    """The last values, with one more; each new state is another part of the old one."""

    def forward(self, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        return x + a, x, a, b


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "bool", "bfloat16", "int32"])
def test_state_of_every_dtype_moves_on(dtype: str) -> None:
    row = spec(dtype, 3)
    cell = bound(Shifted(), row, row, row, row)
    loop = loop_of(cell)
    if loop is None:
        assert dtype in ("bfloat16", "int32", "bool")  # nothing of it is compiled
        return
    given = tuple([(torch.arange(6).reshape(2, 3) + k).to(getattr(torch, dtype)) for k in range(4)])
    for mine, right in zip(loop.call(given, cell.outputs), Shifted()(*given), strict=True):
        assert torch.equal(mine, right)


class Divided(nn.Module):
    def forward(self, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        return i % (j * j + 1), j + 1


def test_integers_divided_by_what_may_be_zero_are_left_to_torch() -> None:
    """Torch raises for 0, so that a request fails."""
    loop = loop_of(bound(Divided(), spec("int64"), spec("int64")))
    assert loop is not None
    assert loop.num_calls == 1


def test_without_anything_to_compile_there_is_no_loop() -> None:
    class Sorted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sort(-1).values

    assert loop_of(bound(Sorted(), spec("float32", 4))) is None


# --- in an engine -----------------------------------------------------------------------------------------------------


class Decoder(nn.Module):
    """A decoder that chooses the next word by its scores; `choose` makes the word and the rest of the state."""

    choose: Callable[..., tuple[Tensor, ...]]

    def __init__(self, kind: type[nn.Module] = nn.LSTMCell) -> None:
        super().__init__()
        self.embed, self.cell, self.out = nn.Embedding(WORDS, 8), kind(8, WIDTH), nn.Linear(WIDTH, WORDS)
        self.num_state = 2 if kind is nn.LSTMCell else 1

    def forward(self, word: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        recurrent, more = state[: self.num_state], state[self.num_state :]
        made = self.cell(self.embed(word), recurrent if self.num_state > 1 else recurrent[0])
        made = made if isinstance(made, tuple) else (made,)
        word, *more = self.choose(self.out(made[0]), word, *more)
        return (word, *made, *more)


class Greedy(Decoder):
    def choose(self, scores: Tensor, word: Tensor) -> tuple[Tensor, ...]:
        return (scores.argmax(-1),)


class Counter(Decoder):
    def choose(self, scores: Tensor, word: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        return scores.argmax(-1), t + 1


class Timed(Decoder):
    def choose(self, scores: Tensor, word: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        return (scores + t[:, None]).argmax(-1), t + 0.5


class Tempered(Decoder):
    def choose(self, scores: Tensor, word: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
        return (scores / temperature[:, None]).argmax(-1), temperature * 0.9


class Flagged(Decoder):
    """Ends, and says nothing more, once it has said a word below 3 twice."""

    def choose(self, scores: Tensor, word: Tensor, low: Tensor, done: Tensor) -> tuple[Tensor, ...]:
        chosen = scores.argmax(-1)
        low = low + (chosen < 3)
        done = done | (low >= 2)
        return torch.where(done, 0, chosen), low, done


class Masked(Decoder):
    """Says no word twice."""

    def choose(self, scores: Tensor, word: Tensor, said: Tensor) -> tuple[Tensor, ...]:
        chosen = scores.masked_fill(said, float("-inf")).argmax(-1)
        return chosen, said | (torch.arange(WORDS) == chosen[:, None])


class Remembering(Decoder):
    """Reads a row of a memory at each step; beyond its end, torch raises."""

    def choose(self, scores: Tensor, word: Tensor, t: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
        row = memory.gather(1, t[:, None, None].expand(-1, 1, WORDS))[:, 0]
        return (scores + row).argmax(-1), t + 1, memory


class Ranked(Decoder):
    """The second best by what torch alone can do."""

    def choose(self, scores: Tensor, word: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        order = scores.softmax(-1).sort(-1, descending=True).indices
        return order[:, 1], t + order[:, 0] % 3


class Worded(Decoder):
    """Looks up what it has counted: the count becomes a token without a row."""

    def choose(self, scores: Tensor, word: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        return torch.where(t > 5, t * 4, scores.argmax(-1)), t + 1


def zeros(decoder: Decoder) -> tuple[Tensor, ...]:
    return (torch.zeros(WIDTH),) * decoder.num_state


class Speaker(bm.Model):
    """A request: (first word, steps, the rest of the state). Answers with all outputs of all steps."""

    def __init__(self, module: Decoder, until: Any, more: Callable[[], tuple[Any, ...]], **options: Any) -> None:
        self.cell = bm.Cell(module, host_outputs=(0,), **options)
        self.until, self.module = until, module
        self.example_request = [1, 3, more()]

    def unfold(self, request: Any) -> Any:
        word, steps, more = request
        made = self.cell.loop((word, *zeros(self.module), *more), until=self.until, max_steps=steps)
        return [part.steps for part in made if part.spec.shape != (MEMORY, WORDS)]


def alone(module: Decoder, request: Any, until: Any) -> list[Tensor]:
    """Return what a request's loop gives in plain torch."""
    word, steps, more = request
    state = tuple([torch.as_tensor(part)[None] for part in (word, *zeros(module), *more)])
    kept: list[tuple[Tensor, ...]] = []
    conditions = until if isinstance(until, dict) else {0: until}
    for _ in range(steps):
        with torch.no_grad():
            state = module(*state)
        kept.append(state)
        values = {output: state[output].numpy() for output in conditions}
        if any(
            (test(values[k]) if callable(test) else values[k] == test)[0]
            for k, test in conditions.items()
            if test is not None
        ):
            break
    return [torch.cat(column) for column in zip(*kept, strict=True) if column[0].shape[1:] != (MEMORY, WORDS)]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    """The calls of loops, which are used wherever there is one: how many steps they ran, and of how many."""
    ran: Ran = []
    run = StateLoop.run

    def noted(self: StateLoop, task: Any, *rest: Any) -> Any:
        done = run(self, task, *rest)
        ran.append((done.num_steps, len(task.ends)))
        return done

    monkeypatch.setattr(StateChoice, "fastest", lambda self, batch: self.loop)
    monkeypatch.setattr(BoundCell, "loop_for", lambda self, batch: None)
    monkeypatch.setattr(StateLoop, "run", noted)
    return ran


def made(module: Decoder) -> Decoder:
    torch.manual_seed(3)
    for weight in module.parameters():
        nn.init.normal_(weight, std=1.0)
    return module.eval()


CASES: dict[str, tuple[Callable[[], Decoder], Callable[[], tuple[Any, ...]], Sequence[Any]]] = {
    "greedy": (Greedy, lambda: (), (None, 2, lambda words: words < 2)),
    "gru": (lambda: Counter(nn.GRUCell), lambda: (0,), (2, {1 + 1: 9})),
    "rnn": (lambda: Counter(nn.RNNCell), lambda: (0,), (2,)),
    "counter": (Counter, lambda: (0,), (None, 2, {3: 7}, {0: 2, 3: lambda t: t > 5})),
    "float": (Timed, lambda: (1.5,), (2, {3: 4.0}, {3: 3})),
    "temperature": (Tempered, lambda: (2.0,), (2, lambda words: words == 2)),
    "flag": (Flagged, lambda: (0, False), ({4: True}, {4: lambda done: done}, 2)),
    "mask": (Masked, lambda: (torch.zeros(WORDS, dtype=torch.bool),), (2, None)),
    "memory": (Remembering, lambda: (0, torch.randn(MEMORY, WORDS, generator=torch.Generator().manual_seed(5))), (2,)),
    "sorted by torch": (Ranked, lambda: (0,), (2, {0: 2, 3: 5})),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_engine_gives_what_each_loop_gives_alone(ran: Ran, name: str) -> None:
    """One request alone, then so many that a step has several blocks, or that lanes change hands."""
    make, more, untils = CASES[name]
    module = made(make())
    most = MEMORY if name == "memory" else 9
    requests = [[k % WORDS, 1 + k * 5 % most, more()] for k in range(75)]
    for until, max_batch in zip(untils, (256, 5, 256, 5), strict=False):
        with bm.Engine(Speaker(module, until, more, max_batch=max_batch), threads=1) as engine:
            ran.clear()
            found = [*engine.map(requests[:1], progress=False), *engine.map(requests[1:], progress=False)]
        assert ran
        for mine, request in zip(found, requests, strict=True):
            for values, right in zip(mine, alone(module, request, until), strict=True):
                given = torch.stack(list(values)) if isinstance(values[0], Tensor) else torch.tensor(list(values))
                torch.testing.assert_close(given.to(right.dtype), right, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("name", "make", "more"), [
    ("a token without a row", Worded, lambda: (0,)),
    ("torch raises", Remembering, lambda: (0, torch.zeros(MEMORY, WORDS))),
])  # fmt: skip
def test_a_step_that_cannot_be_computed_fails_its_own_request(
    ran: Ran, name: str, make: type[Decoder], more: Callable[[], tuple[Any, ...]]
) -> None:
    module = made(make())
    requests = [[k, 4 if k % 2 else 9, more()] for k in range(6)]
    with bm.Engine(Speaker(module, None, more), threads=1) as engine:
        answers = [engine.submit(request) for request in requests]
        for answer, request in zip(answers, requests, strict=True):
            if request[1] == 9:
                with pytest.raises(bm.errors.BatchmakerError):
                    answer.result()
            else:
                words = alone(module, request, None)[0]
                assert list(answer.result()[0]) == words.tolist()
    assert any(done < of for done, of in ran), "a task whose steps ran in the loop up to the wrong one"


def test_a_test_that_raises_fails_its_own_request(ran: Ran) -> None:
    module = made(Counter())

    def until(words: Any) -> Any:
        if (words == 2).any():
            raise ValueError("two")
        return words == 11

    requests = [[k, 8, (0,)] for k in range(10)]
    wanted = [alone(module, request, 2)[0].tolist() for request in requests]
    assert {2 in words for words in wanted} == {True, False}
    with bm.Engine(Speaker(module, until, lambda: (0,)), threads=1) as engine:
        answers = [engine.submit(request) for request in requests]
        for answer, words, request in zip(answers, wanted, requests, strict=True):
            if 2 in words:
                with pytest.raises(bm.errors.BatchmakerError, match="two"):
                    answer.result()
            else:
                assert list(answer.result()[0]) == alone(module, request, 11)[0].tolist()
    assert ran


@pytest.mark.parametrize(
    ("until", "expected"), [(2, False), (lambda words: words == 2, True), ({0: 2, 1: lambda h: h[:, 0] > 99}, True)]
)
def test_a_greedy_decoder_needs_the_loop_only_if_more_than_a_word_ends_it(
    monkeypatch: pytest.MonkeyPatch, until: Any, expected: bool
) -> None:
    ran: list[str] = []
    run, greedy = StateLoop.run, GreedyLoop.run
    monkeypatch.setattr(StateChoice, "fastest", lambda self, batch: self.loop)
    monkeypatch.setattr(ChainLoop, "fastest", lambda self, batch: self.loop)
    monkeypatch.setattr(StateLoop, "run", lambda self, *rest: ran.append("any state") or run(self, *rest))
    monkeypatch.setattr(GreedyLoop, "run", lambda self, *rest: ran.append("greedy") or greedy(self, *rest))
    module = made(Greedy())
    with bm.Engine(Speaker(module, until, tuple), threads=1) as engine:
        (cell,) = engine.registry.bound
        assert cell.split(0).ends_by_function is expected
        ran.clear()
        found = engine.submit([4, 9, ()]).result()[0]
    assert list(found) == alone(module, [4, 9, ()], 2)[0].tolist()
    assert set(ran) == ({"greedy", "any state"} if expected else {"greedy"})


class Counting(nn.Module):
    """(x) with a counter: a cell of a run, whose input is projected for all steps before."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, WIDTH)

    def forward(self, x: Tensor, h: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(x * 2, h)
        return torch.where(t[:, None] > 2, h, h * 0.5), t + 1


class Run(bm.Model):
    example_request = [[0.0] * 4] * 3

    def __init__(self, module: nn.Module) -> None:
        self.cell = bm.Cell(module, max_batch=4)

    def unfold(self, rows: Any) -> Any:
        h, t = self.cell.run(rows, (torch.zeros(WIDTH), 0))
        return [h.steps, t]


def test_runs_with_a_counter_go_over_their_inputs(ran: Ran) -> None:
    torch.manual_seed(1)
    module = Counting().eval()
    requests = [torch.randn(1 + k % 6, 4).tolist() for k in range(11)]
    with bm.Engine(Run(module), threads=1) as engine:
        ran.clear()
        found = engine.map(requests, progress=False)
    assert ran
    for (states, t), rows in zip(found, requests, strict=True):
        h, count = torch.zeros(1, WIDTH), torch.tensor([0])
        for mine, row in zip(states, rows, strict=True):
            with torch.no_grad():
                h, count = module(torch.tensor([row]), h, count)
            torch.testing.assert_close(mine, h[0], rtol=0, atol=2e-6)
        assert t == len(rows)


class Repeated(Decoder):
    """forward(word, *state) without any state: torch.export then counts no argument for it."""

    def forward(self, word: Tensor, *state: Tensor) -> Tensor:
        return self.out(self.embed(word).repeat(1, 2)).argmax(-1)


def test_arguments_that_may_be_any_number_may_be_none(ran: Ran) -> None:
    loop = loop_of(bound(Repeated(), spec("int64")))
    assert loop is not None
    word = torch.tensor([3, 5])
    assert loop.call((word,), (spec("int64"),))[0].shape == (2,)


@pytest.mark.parametrize("until", [{}, {9: 1}, {-1: 1}, {"word": 1}])
def test_until_names_outputs_by_number(until: Any) -> None:
    with bm.Engine(Speaker(made(Counter()), 2, lambda: (0,)), threads=1) as engine:
        model = Speaker(made(Counter()), until, lambda: (0,))
        del model.example_request
    with bm.Engine(model, threads=1) as engine, pytest.raises(bm.errors.BatchmakerError, match="until looks at"):
        engine.submit([1, 3, (0,)]).result()
