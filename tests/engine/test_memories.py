"""Cells that read memories, on live engines: every answer is the one that plain PyTorch gives the request alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import pytest
import torch
from checked_commands import CommandChecks
from engine_models import assert_balanced
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain_cells import PlainCell, resolved, same
from planned_requests import (
    HIDDEN,
    MEMORIES,
    VOCABULARY,
    Cuts,
    Forgets,
    Hand,
    Listens,
    Look,
    Looks,
    Maps,
    Plan,
    Planned,
    PlannedWaiting,
    Recalls,
    Returns,
    Waits,
    cells_of,
    modules,
)
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.errors import (
    BatchmakerError,
    ModelError,
    OptionError,
    SavedModelError,
    ShapeError,
)
from batchmaker.executor.memories import MemoryReader
from insides import listen_to_gathering, schedulers

MODULES: Final = modules(1)
WIDTH: Final = HIDDEN
NAMES: Final = ("read", "look", "listen", "recall", "mix", "speak")


class Everything(bm.Model):
    """A request [steps, WIDTH] of floats, read as words too, and what is done with it."""

    def __init__(self, use: Callable[[Any, Any], Any], **options: Any) -> None:
        self.use = use
        for name in NAMES:
            outputs = (0,) if name in ("recall", "speak") else ()
            setattr(self, name, bm.Cell(MODULES[name], memory=MEMORIES.get(name, ()), host_outputs=outputs, **options))

    def unfold(self, x: Any) -> Any:
        return self.use(self, x)


class Plainly:
    """The same cells in plain PyTorch."""

    def __init__(self) -> None:
        states = {"read": (WIDTH, WIDTH), "listen": (WIDTH,), "recall": (WIDTH,)}
        for name in NAMES:
            memory, own = 1 if name in MEMORIES else None, 1 if name == "recall" else None
            setattr(self, name, PlainCell(MODULES[name], states.get(name, ()), memory=memory, own=own))


def words(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(1000 * length + seed).integers(0, VOCABULARY, length).tolist()


REQUESTS: Final = [words(length, seed) for seed in range(3) for length in (1, 2, 3, 4, 5, 9, 17, 33, 40)]

USES: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "the steps of a run": lambda m, x: m.look((h := m.read.run(x)[0]), h.steps),
    "a part of them": lambda m, x: m.look((h := m.read.run(x)[0]), h.steps[len(x) // 2 :]),
    "every second, from the end": lambda m, x: m.look((h := m.read.run(x)[0]), h.steps[::-2]),
    "one value twice and more": lambda m, x: m.look((h := m.read.run(x)[0]), [h, h, m.look(h, h.steps)]),
    "the nodes of a map": lambda m, x: m.look(
        (h := m.read.run(x)[0]), m.mix.map(h.steps, h.steps)
    ),
    "the nodes of a tree": lambda m, x: m.look(
        (h := m.read.run(x)[0]), m.mix.tree([[0, len(x) - 1], [0, len(x)]], h.steps)
    ),
    "data of the request": lambda m, x: m.look(
        m.read.run(x)[0], [[0.1 * word + 0.01 * k for k in range(WIDTH)] for word in x]
    ),
    "one memory in all steps of a run": lambda m, x: m.listen.run(x[::-1], memory=m.read.run(x)[0].steps).steps,
    "one memory of all elements of a map": lambda m, x: m.look.map(
        m.read.run(x)[0].steps, memory=m.read.run(x[::-1])[0].steps
    ),
    "a memory made of what read one": lambda m, x: m.look(
        (h := m.listen.run(x, memory=m.read.run(x)[0].steps)), h.steps
    ),
    "its own earlier steps": lambda m, x: m.recall.loop((x[0], [0.1] * WIDTH), max_steps=2 * len(x))[1].steps,
    "its own earlier steps until a word": lambda m, x: m.recall.loop(
        (x[0], [0.1] * WIDTH), until=x[-1], max_steps=2 * len(x)
    )[0].steps,
    "what follows a loop over its past": lambda m, x: m.look(
        m.recall.loop((x[0], [0.1] * WIDTH), until=x[-1], max_steps=9)[1], m.read.run(x)[0].steps
    ),
    "steps of a loop over its past": lambda m, x: m.look(
        [0.2] * WIDTH, m.recall.loop((x[0], [0.1] * WIDTH), max_steps=len(x))[1].steps
    ),
}  # fmt: skip


def checked(model: bm.Model | dict[str, bm.Model], policy: str = "cellular", **options: Any) -> tuple[bm.Engine, Any]:
    """Return an engine whose commands and state are checked at every turn, and what checks them."""
    engine = bm.Engine(model, policy, threads=1, **options)
    checks = [CommandChecks(core, every=1) for core in schedulers(engine)]
    for driver, each in zip(engine.drivers, checks, strict=True):
        driver.record = each
    return engine, checks


def assert_as_alone(
    model: Any, use: Callable[[Any, Any], Any], policy: str = "cellular", given: Sequence[Any] = REQUESTS
) -> None:
    engine, checks = checked(model, policy)
    with engine:
        answers = engine.map(given, progress=False)
    assert not [wrong for each in checks for wrong in each.wrong]
    assert_balanced(engine)
    plain = Plainly()
    for request, answer in zip(given, answers, strict=True):
        wanted = resolved(use(plain, request))
        assert same(answer, wanted, 1e-4), f"{len(request)} words: {answer}, alone {wanted}"


# --- what is read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", USES)
def test_a_cell_reads_a_sequence_of_any_length(name: str) -> None:
    assert_as_alone(Everything(USES[name]), USES[name])


@pytest.mark.parametrize(
    "policy",
    [
        "auto", "lazy", "depth",
        *[pytest.param(policy, marks=pytest.mark.slow) for policy in ("cellular:max_steps=1", "agenda", "sufficient")],
    ],
)  # fmt: skip
def test_every_policy_gives_the_same(policy: str) -> None:
    def use(m: Any, x: Any) -> Any:
        h = m.read.run(x)[0]
        d = (
            m.listen.run(x[::-1], h, memory=h.steps)
            if type(m) is Everything
            else m.listen.run(x[::-1], (h,), memory=h.steps)
        )
        token, _ = m.recall.loop((x[0], d), until=x[-1], max_steps=12)
        return [d.steps, token, m.look.map(d.steps, memory=h.steps[::-1])]

    assert_as_alone(Everything(use, max_batch=4), use, policy, REQUESTS[::2])


def test_requests_of_one_shape_share_a_graph_with_memories() -> None:
    use = USES["one memory in all steps of a run"]
    same_shape = [words(7, seed) for seed in range(40)]
    engine, checks = checked(Everything(use))
    with engine:
        answers = [engine.submit(request).result() for request in same_shape]
    assert not [wrong for each in checks for wrong in each.wrong]
    for request, answer in zip(same_shape, answers, strict=True):
        assert same(answer, resolved(use(Plainly(), request)), 1e-4)


class Waiting(bm.Model):
    """Reads a memory after it has waited, and drops its handles on the way."""

    def __init__(self) -> None:
        self.read, self.look, self.say = (
            bm.Cell(MODULES[name], memory=MEMORIES.get(name, ())) for name in ("read", "look", "say")
        )

    def unfold(self, x: Any) -> Iterator[Any]:
        h = self.read.run(x)[0]
        steps = h.steps
        for _ in range(3):
            word = yield self.say(h)
            h = self.look(h, steps[word % len(x) :])
        del steps
        yield h
        return self.look(h, [h])


def test_a_function_that_waits_reads_what_it_has_made_before() -> None:
    engine, checks = checked(Waiting())
    with engine:
        answers = engine.map(REQUESTS, progress=False)
    assert not [wrong for each in checks for wrong in each.wrong]
    assert_balanced(engine)
    read, look, say = (MODULES[name] for name in ("read", "look", "say"))
    plain_read = PlainCell(read, (WIDTH, WIDTH))
    plain_look, plain_say = PlainCell(look, memory=1), PlainCell(say)
    for request, answer in zip(REQUESTS, answers, strict=True):
        h = plain_read.run(request)[0]
        steps = h.steps
        for _ in range(3):
            h = plain_look(h, steps[int(plain_say(h).row) % len(request) :])
        assert same(answer, plain_look(h, [h]).row, 1e-4) or same(answer, [plain_look(h, [h]).row], 1e-4)


class Beams(bm.Model):
    """The two best words of each beam go on; all beams read one memory."""

    def __init__(self) -> None:
        self.read, self.listen, self.score = (
            bm.Cell(MODULES["read"]), bm.Cell(MODULES["listen"], memory="keys"), bm.Cell(nn.Linear(WIDTH, VOCABULARY)),
        )  # fmt: skip

    def unfold(self, x: Any) -> Iterator[Any]:
        h = self.read.run(x)[0]
        steps, beams = h.steps, [(0.0, 1, h)]
        for _ in range(4):
            states = [self.listen(word, steps, state) for _, word, state in beams]
            scores = yield [self.score(state) for state in states]
            found = [
                (before[0] + float(row[word]), word, state)
                for before, row, state in zip(beams, scores, states, strict=True)
                for word in row.topk(2).indices.tolist()
            ]
            beams = sorted(found, key=lambda beam: -beam[0])[:2]
        return beams[0][2]


def test_beams_read_one_memory() -> None:
    model = Beams()
    engine, checks = checked(model)
    with engine:
        answers = engine.map(REQUESTS, progress=False)
    assert not [wrong for each in checks for wrong in each.wrong]
    assert_balanced(engine)
    for request, answer in zip(REQUESTS, answers, strict=True):
        assert same(answer, _played(Beams.unfold(_Alone(model), request)), 1e-4)


def _played(unfolding: Iterator[Any]) -> Any:
    """Return what a function that waits returns, if it is played in plain PyTorch."""
    wanted = next(unfolding)
    while True:
        try:
            wanted = unfolding.send([value.row for value in wanted])
        except StopIteration as stop:
            return stop.value.row


class _Alone:
    """The cells of `Beams` in plain PyTorch."""

    def __init__(self, model: Any) -> None:
        self.read, self.listen = PlainCell(MODULES["read"], (WIDTH, WIDTH)), PlainCell(MODULES["listen"], memory=1)
        self.score = PlainCell(model.score.module)


class Chunks(bm.Model):
    """Chunks whose memory is what earlier ones have kept, and their own."""

    def __init__(self) -> None:
        self.read, self.look = bm.Cell(MODULES["read"]), bm.Cell(MODULES["look"], memory="keys")

    def unfold(self, x: Any) -> Any:
        return self.unfold_chunk(x, None)[0]

    def unfold_chunk(self, x: Any, state: Any) -> Any:
        h, c = self.read.run(x, None if state is None else state["last"])
        earlier = [] if state is None else state["ends"]
        return self.look(h, [*earlier, h]), {"last": (h, c), "ends": [*earlier, h]}


SIZES = (3, 1, 5, 2, 3, 1, 5, 2)


def test_a_chunk_reads_what_its_sequence_has_kept() -> None:
    engine, checks = checked(Chunks())
    with engine, engine.open_sequence() as sequence:
        got = [sequence.submit(words(n)).result() for n in SIZES]
    assert not [wrong for each in checks for wrong in each.wrong]
    assert_kept(got)


def test_a_memory_goes_with_its_sequence_to_another_engine() -> None:
    engine, checks = checked(Chunks())
    with engine, engine.open_sequence() as sequence:
        got = [sequence.submit(words(n)).result() for n in SIZES[:4]]
        state = sequence.state()
    other, more = checked(Chunks())
    with other, other.open_sequence(state=state) as moved:
        got += [moved.submit(words(n)).result() for n in SIZES[4:]]
    assert not [wrong for each in (*checks, *more) for wrong in each.wrong]
    assert_kept(got)


def assert_kept(got: list[Any]) -> None:
    read, look = PlainCell(MODULES["read"], (WIDTH, WIDTH)), PlainCell(MODULES["look"], memory=1)
    ends: list[Any] = []
    state = None
    for n, answer in zip(SIZES, got, strict=True):
        state = read.run(words(n), state)
        ends.append(state[0])
        assert same(answer, look(state[0], ends).row, 1e-4)


class ItsOwnMemory(bm.Model):
    """Each element of a sequence reads the whole sequence, backwards."""

    def __init__(self) -> None:
        self.read, self.look = bm.Cell(MODULES["read"]), bm.Cell(MODULES["look"], memory="keys")

    def unfold(self, x: Any) -> Any:
        steps = self.read.run(x, None)[0].steps[::-1]
        return self.look.map(steps, memory=steps)


def test_a_sequence_is_its_own_memory() -> None:
    engine, _ = checked(ItsOwnMemory())
    read, look = PlainCell(MODULES["read"], (WIDTH, WIDTH)), PlainCell(MODULES["look"], memory=1)
    with engine:
        for n in (1, 4, 4, 2):
            steps = [read.run(words(n)[: k + 1], None)[0] for k in range(n)][::-1]
            for answer, step in zip(engine.submit(words(n)).result(), steps, strict=True):
                assert same(answer, look(step, steps).row, 1e-4)


# --- attention over the past ---------------------------------------------------------------------------------------


class Block(nn.Module):
    """x, keys and values of earlier steps -> y, key and value of this one: causal attention, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, past: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.project(x).chunk(3, -1)
        keys, values = past.chunk(2, -1)
        scores = (keys * q[:, None]).sum(-1).masked_fill(torch.arange(past.shape[1]) >= number[:, None], -torch.inf)
        scores = torch.cat([scores, (k * q).sum(-1, keepdim=True)], 1).softmax(-1)
        mixed = (scores[:, :, None] * torch.cat([values, v[:, None]], 1)).sum(1)
        return x + self.out(mixed), torch.cat([k, v], -1)

    def whole(self, x: Tensor) -> Tensor:
        """The same over a sequence [steps, WIDTH]."""
        q, k, v = self.project(x).chunk(3, -1)
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        return x + self.out((q @ k.T).masked_fill(later, -torch.inf).softmax(-1) @ v)


class Layers(bm.Model):
    """A small Transformer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        past = bm.Memory("past", own=True, output=1, row=2 * WIDTH)
        self.layers = [bm.Cell(Block().eval(), memory=past) for _ in range(3)]

    def unfold(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer.run(x)[0].steps
        return x


def test_layers_that_read_their_own_past_are_a_transformer() -> None:
    model = Layers()
    requests = [
        torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(length)) for length in range(1, 40, 3)
    ]
    engine, checks = checked(model)
    with engine, torch.no_grad():
        answers = engine.map(requests, progress=False)
        assert not [wrong for each in checks for wrong in each.wrong]
        for x, answer in zip(requests, answers, strict=True):
            for layer in model.layers:
                x = layer.module.whole(x)
            assert same(answer, x, 1e-4)
    assert_balanced(engine)


# --- failures ------------------------------------------------------------------------------------------------------


class Sour(nn.Module):
    """A look that raises where the first number of the memory is above 2."""

    def __init__(self) -> None:
        super().__init__()
        self.look = Look()

    def forward(self, h: Tensor, keys: Tensor, number: Tensor) -> Tensor:
        if bool((keys[:, 0, 0] > 2.0).any()):
            raise ValueError("sour")
        return self.look(h, keys, number)


def test_a_row_at_which_the_cell_raises_fails_alone() -> None:
    class Tasting(bm.Model):
        def __init__(self) -> None:
            self.sour = bm.Cell(Sour().eval(), memory="keys")

        def unfold(self, x: Any) -> Any:
            return self.sour([0.5] * WIDTH, x)

    model = Tasting()
    requests = [np.full((1 + k % 5, WIDTH), 3.0 if k % 7 == 0 else 0.1 * (k % 4), np.float32) for k in range(1, 60)]
    engine, checks = checked(model)
    with engine:
        answers = [engine.submit(request) for request in requests]
        for request, answer in zip(requests, answers, strict=True):
            error = answer.exception()
            if request[0, 0] > 2.0:
                assert "sour" in str(error)
                continue
            memory = torch.from_numpy(request)[None]
            with torch.no_grad():
                wanted = model.sour.module.look(torch.full((1, WIDTH), 0.5), memory, torch.tensor([len(request)]))
            assert same(answer.result(), wanted[0], 1e-4)
    assert not [wrong for each in checks for wrong in each.wrong]
    assert_balanced(engine)


def test_what_is_cancelled_gives_its_memory_back() -> None:
    use = USES["one memory in all steps of a run"]
    engine, checks = checked(Everything(use))
    with engine:
        answers = [engine.submit(words(40, seed)) for seed in range(30)]
        for answer in answers[::2]:
            answer.cancel()
        for answer in answers:
            answer.exception()
    assert not [wrong for each in checks for wrong in each.wrong]
    assert_balanced(engine)


# --- requests of any form ------------------------------------------------------------------------------------------

REF = st.integers(0, 7)
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=20).map(tuple)
MOVE = st.one_of(
    st.builds(Looks, REF, REF, st.booleans()),
    st.builds(Listens, TOKENS, st.none() | REF, REF, st.booleans()),
    st.builds(Recalls, REF, REF, st.none() | st.integers(0, VOCABULARY - 1), st.integers(1, 20)),
    st.builds(Maps, REF),
    st.builds(Cuts, REF, REF),
    st.builds(Waits, REF, st.booleans()),
    st.builds(Forgets, st.sampled_from(["vectors", "rows"]), REF),
    st.builds(Returns, st.sampled_from(["vectors", "rows", "words"]), REF),
)
PLANS = st.lists(st.builds(Plan, st.lists(MOVE, min_size=1, max_size=8).map(tuple)), min_size=1, max_size=6)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(plans=PLANS, policy=st.sampled_from(["auto", "cellular", "cellular:max_steps=1", "lazy"]))
def test_graphs_with_memories_equal_plain_pytorch_one_by_one(plans: list[Plan], policy: str) -> None:
    cells = cells_of(MODULES, 8)
    engine, checks = checked({"plain": Planned(cells), "waiting": PlannedWaiting(cells)}, policy)
    with engine:
        asked = [
            (plan, engine.submit(plan, model="waiting" if plan.waits else "plain"))
            for plan in plans
            for _ in range(3)
        ]  # fmt: skip
        for _, answer in asked:
            answer.exception(120)
    assert not [wrong for each in checks for wrong in each.wrong]
    assert_balanced(engine)
    states = {"read": (HIDDEN, HIDDEN), "listen": (HIDDEN,), "recall": (HIDDEN,)}
    gap = [float("inf")]

    def note(_module: nn.Module, _given: Any, scores: Tensor) -> None:
        best, second = scores.topk(2).values[0].tolist()
        gap[0] = min(gap[0], best - second)

    hook = MODULES["recall"].out.register_forward_hook(note)
    plain = {
        name: PlainCell(module, states.get(name, ()), memory=1 if name in MEMORIES else None,
                        own=1 if name == "recall" else None)
        for name, module in MODULES.items()
    }  # fmt: skip
    try:
        for plan, answer in asked:
            hand, gap[0] = Hand(plain), float("inf")
            wanted = list[Any]()
            error: Exception | None = None
            try:
                playing = plan.play(hand)
                waited = next(playing, None)
                while waited is not None:
                    waited = _next(playing, resolved(waited))
                wanted = resolved(hand.results)
            except Exception as raised:  # of a cell
                error = raised
            if gap[0] < 1e-3:  # rounding may have chosen another token
                continue
            if error is not None:
                assert isinstance(answer.exception(), BatchmakerError)
            else:
                assert same(answer.result(), wanted, 1e-4)
    finally:
        hook.remove()


def _next(playing: Any, sent: Any) -> Any:
    try:
        return playing.send(sent)
    except StopIteration:
        return None


# --- what is gathered ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["one memory in all steps of a run", "its own earlier steps"])
def test_a_run_gathers_its_memory_once_for_each_room(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rooms, read = list[int](), [0]
    asked = MemoryReader.read

    def ask(self: Any, *given: Any, **options: Any) -> Any:
        read[0] += 1
        return asked(self, *given, **options)

    listen_to_gathering(monkeypatch, lambda made: rooms.append(made.values.shape[1]))
    monkeypatch.setattr(MemoryReader, "read", ask)
    engine = bm.Engine(Everything(USES[name]), "cellular:max_steps=10", threads=1)
    with engine:
        engine.submit(words(20)).result()
        rooms.clear()
        read[0] = 0
        engine.submit(words(20)).result()
    assert read[0] == (20 if name.startswith("one") else 40)
    assert rooms == ([32] if name.startswith("one") else [1, 2, 4, 8, 16, 32, 64])


# --- refusals ------------------------------------------------------------------------------------------------------


class Mean(nn.Module):
    def forward(self, keys: Tensor, number: Tensor) -> Tensor:
        return keys.mean(1)


class Unmasked(nn.Module):
    def forward(self, h: Tensor, keys: Tensor, number: Tensor) -> Tensor:
        return (((keys * h[:, None]).sum(-1, keepdim=True)).softmax(1) * keys).sum(1)


class Whole(nn.Module):
    def forward(self, h: Tensor, keys: Tensor, number: Tensor) -> Tensor:
        return (keys * h[:, None]).sum(-1)


class Of(bm.Model):
    def __init__(self, cell: bm.Cell, use: Callable[[Any, bm.Cell], Any]) -> None:
        self.cell, self.use, self.read = cell, use, bm.Cell(MODULES["read"])

    def unfold(self, x: Any) -> Any:
        h, _ = self.read.run(x)
        return self.use(h, self.cell)


def assert_refused(cell: bm.Cell, use: Callable[[Any, bm.Cell], Any], error: type[Exception], said: str) -> None:
    with bm.Engine(Of(cell, use)) as engine, pytest.raises(error, match=said):
        engine.submit([1, 2, 3]).result()


@pytest.mark.parametrize("module", [Mean(), Unmasked()])
def test_a_cell_that_looks_beyond_its_number_is_refused(module: nn.Module) -> None:
    use = (lambda h, cell: cell(h.steps)) if type(module) is Mean else (lambda h, cell: cell(h, h.steps))
    said = r"output 0: it depends on rows after the \d of a memory, or on their room"
    assert_refused(bm.Cell(module, memory="keys"), use, ModelError, said)


def test_a_row_of_an_output_that_is_as_wide_as_the_room_is_refused() -> None:
    assert_refused(
        bm.Cell(Whole(), memory="keys"), lambda h, cell: cell(h, h.steps), ShapeError, "may not depend on the room"
    )


RECALL: Final = bm.Memory("past", own=True, output=1, row=HIDDEN)


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda h, cell: cell(h), "its memory 'keys' is missing: give a sequence of values"),
        (lambda h, cell: cell(h, h.steps, 3), "takes 2 arguments, got 3"),
        (
            lambda h, cell: cell.map(h.steps),
            "memory= gives its memories, which are 'keys'|its memory 'keys' is missing",
        ),
        (lambda h, cell: cell.map(h.steps, memory=[]), "the sequence is empty"),
        (lambda h, cell: cell.tree([[0, 1]], h.steps), "reads a memory, which the nodes of a tree cannot"),
        (lambda h, cell: cell(h, [[1.0, 2.0]]), r"cell|input"),
    ],
)
def test_calls_that_do_not_fit_say_what_is_missing(use: Any, said: str) -> None:
    assert_refused(bm.Cell(MODULES["look"], memory="keys"), use, BatchmakerError, said)


class Beside(nn.Module):
    """(h, keys, number, other) -> h: the keys and the other are projected."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(3, WIDTH)

    def forward(self, h: Tensor, keys: Tensor, number: Tensor, other: Tensor) -> Tensor:
        known = torch.arange(keys.shape[1]) < number[:, None]
        return (h + self.other(other) + (self.keys(keys) * known[..., None]).sum(1))[:, :WIDTH]


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda h, cell: cell(["a"] * WIDTH, h.steps, [1.0] * 3), "input 0: got the text"),
        (lambda h, cell: cell(h, "keys", [1.0] * 3), "input 1: got the text"),
        (
            lambda h, cell: cell(h, [[1.0] * 2], [1.0] * 3),
            r"input 1: got rows of float32\[4, 2\], expected float32\[4, ",
        ),
        (lambda h, cell: cell(h, h.steps, [1.0] * 2), r"input 3: got rows of float32\[2\], expected float32\[3\]"),
        (lambda h, cell: cell.map(h.steps, [["a"] * 3], memory=h.steps), "input 3: got the text"),
        (
            lambda h, cell: [cell(h, h.steps, [1.0] * 3), cell(h, h.steps, h)][1],
            r"input 3: got .*, expected float32\[3",
        ),
        (
            lambda h, cell: cell.run(h.steps, init=torch.ones(3), memory=h.steps),
            r"input 3: state rows are float32\[3\]",
        ),
    ],
)
def test_an_input_beside_a_memory_is_named_by_its_place_in_forward(use: Any, said: str) -> None:
    assert_refused(bm.Cell(Beside(), memory="keys"), use, BatchmakerError, f"cell 'cell', {said}")


def test_the_steps_of_a_loop_that_a_value_ends_are_no_memory() -> None:
    def use(m: Any, x: Any) -> Any:
        _, h = m.speak.loop((x[0], [0.1] * WIDTH), until=3, max_steps=5)
        return m.look(h, h.steps)

    with bm.Engine(Everything(use)) as engine, pytest.raises(ModelError, match="the length of a loop with `until`"):
        engine.submit([1, 2]).result()


def test_only_runs_and_loops_have_earlier_steps_of_their_own() -> None:
    cell = bm.Cell(MODULES["recall"], memory=RECALL)
    assert_refused(
        cell, lambda h, cell: cell(1, h), ModelError, "its own earlier steps, which only `run` and `loop` have"
    )


def test_an_own_memory_has_the_rows_of_its_output() -> None:
    cell = bm.Cell(MODULES["recall"], memory=bm.Memory("past", own=True, output=0, row=HIDDEN))
    assert_refused(
        cell,
        lambda h, cell: cell.loop((1, h), max_steps=3)[0],
        ModelError,
        r"declared as float32\[16\], but the output that it keeps .* is int64",
    )


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        ("values", "has no parameter 'values'"),
        ("number", "the parameter after 'number' of forward.. is the number"),
        (("keys", "keys"), "names a parameter twice"),
        (bm.Memory("keys", own=True), "own=True needs row="),
        (bm.Memory("keys", row=3), "row= is for own=True"),
        (3.0, "not iterable|takes names"),
        ((3.0,), "takes names of parameters"),
    ],
)
def test_declarations_that_do_not_fit_are_refused(memory: Any, said: str) -> None:
    with pytest.raises((OptionError, TypeError), match=said):
        bm.Cell(Look(), memory=memory)


def test_a_model_with_memories_is_not_for_gpus_and_is_not_saved(tmp_path: Any) -> None:
    with pytest.raises(OptionError, match="cell 'look' reads a memory, which runs on the CPU only"):
        bm.Engine(Chunks(), device="cuda")
    with pytest.raises(SavedModelError, match="cell 'look': cannot be saved: it reads a memory"):
        bm.save(Chunks(), tmp_path / "saved", example_request=[1, 2, 3])


class Times(nn.Module):
    """A number -> itself times 10 ** k, for so many k from `first` on."""

    def __init__(self, first: int, count: int) -> None:
        super().__init__()
        self.first, self.count = first, count

    def forward(self, x: Tensor) -> Any:
        outputs = tuple(x * 10.0 ** (self.first + k) for k in range(self.count))
        return outputs if self.count > 1 else outputs[0]


class InOrder(nn.Module):
    """The sum of its rows, each times its place."""

    def forward(self, rows: Tensor, number: Tensor) -> Tensor:
        places = torch.arange(1, rows.shape[1] + 1)
        return (rows * (places * (places <= number.unsqueeze(-1))).unsqueeze(-1)).sum(1)


class OfSeveralCells(bm.Model):
    """A memory of values of cells whose other outputs differ, so that their rows are in different tables."""

    def __init__(self) -> None:
        self.one, self.two, self.three = bm.Cell(Times(0, 1)), bm.Cell(Times(1, 2)), bm.Cell(Times(3, 1))
        self.read = bm.Cell(InOrder(), memory="rows")

    def unfold(self, x: Any) -> Any:
        one, (two, _), three = self.one(x), self.two(x), self.three(x)
        inside = bm.cond(True, lambda: self.read([two, one]), lambda: self.read([one]))
        return self.read([one, two]), self.read([two, three, one, one]), self.read([three, one]), inside


def test_a_memory_may_be_of_values_of_several_cells() -> None:
    with bm.Engine(OfSeveralCells(), threads=1) as engine:
        for _ in range(2):
            answers = engine.map([[float(x)] for x in range(1, 9)], progress=False)
            for x, found in enumerate(answers, start=1):
                assert [float(one) for one in found] == [21.0 * x, 2017.0 * x, 1002.0 * x, 12.0 * x]
