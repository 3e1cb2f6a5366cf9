"""Templates: what they give for a request is what unfolding it gives, and where that is not proved there are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving_templates import Look, Serving
from torch import Tensor, nn
from unfolding_forms import Step

import batchmaker as bm
from batchmaker.model import template_cache
from batchmaker.model.registry import CellRegistry
from batchmaker.model.sequence_state import KeptState
from batchmaker.model.template_cache import TemplateCache
from batchmaker.model.template_values import gather
from batchmaker.model.templates import Template, prove
from batchmaker.model.unfolding import Unfolding


class Add(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Shapes(bm.Model):
    """What unfold does is given from outside; chunks go on from what the last one kept."""

    def __init__(self, does: Callable[..., Any]) -> None:
        self.look = bm.Cell(Look())
        self.add = bm.Cell(Add())
        self.step = bm.Cell(Step(), host_outputs=(0,))
        self.does = does
        self.calls = 0

    def unfold(self, request: Any) -> Any:
        return self.does(self, request)

    def unfold_chunk(self, chunk: Any, state: Any) -> tuple[Any, Any]:
        return self.does(self, chunk, state)


@pytest.fixture(scope="module")
def types() -> CellRegistry:
    return CellRegistry()


@pytest.fixture
def serve(types: CellRegistry) -> Callable[..., Serving]:
    return lambda does, model=None: Serving(model or Shapes(does), TemplateCache(types.types, 1000), types)


FORMS: dict[str, tuple[Callable[..., Any], Callable[[np.random.Generator], Any]]] = {
    "chain": (lambda m, r: m.look.run(r), lambda g: g.integers(0, 10, 3).tolist()),
    "steps": (lambda m, r: m.look.run(r).steps, lambda g: g.integers(0, 10, 3)),
    "last two": (lambda m, r: m.look.run(r[-2:]), lambda g: torch.from_numpy(g.integers(0, 10, 3))),
    "reversed": (lambda m, r: m.look.run(r[::-1]), lambda g: g.integers(0, 10, 3).tolist()),
    "framed": (lambda m, r: m.look.run([1, *r, 2]), lambda g: g.integers(0, 10, 3).tolist()),
    "init": (lambda m, r: m.look.run(r["w"], (r["h"],)), lambda g: {"w": g.integers(0, 10, 3), "h": g.random(2)}),
    "map": (lambda m, r: m.add.map(r, r[::-1]), lambda g: g.random((3, 2)).tolist()),
    "calls": (lambda m, r: [m.look(w, [0.5, 0.5]) for w in r], lambda g: g.integers(0, 10, 3).tolist()),
    "fold": (lambda m, r: m.add(m.add(r[0], r[1]), r[2]), lambda g: torch.from_numpy(g.random((3, 2), np.float32))),
    "frames": (lambda m, r: m.add.map(r.reshape(4, 2), r.reshape(2, 4).T), lambda g: g.random(8).astype(np.float32)),
    "windows": (lambda m, r: m.add.map(r.unfold(0, 2, 1), r.unfold(0, 2, 1)), lambda g: torch.from_numpy(g.random(6))),
    "tree": (
        lambda m, r: m.add.tree([[i, i + 1] for i in range(0, 2 * len(r) - 2, 2)], r)[-1],
        lambda g: g.random((4, 2)).tolist(),
    ),
    "loop": (lambda m, r: m.step.loop((r, [0.0, 0.0]), until=4, max_steps=5)[0].steps, lambda g: int(g.integers(0, 9))),
    "dict": (lambda m, r: {"a": m.look.run(r["a"]), "n": len(r["a"])}, lambda g: {"a": g.integers(0, 10, 2).tolist()}),
    "kinds": (
        lambda m, r: m.look.run([word for word in r if isinstance(word, int) and type(word) is int]),
        lambda g: g.integers(0, 10, 3).tolist(),
    ),
    "nested": (
        lambda m, r: m.add(*[m.look(word if isinstance(word, int) else word[0], [0.5, 0.5]) for word in r]),
        lambda g: (int(g.integers(10)), (int(g.integers(10)),)),
    ),
    "pairs": (lambda m, r: [m.look(w, h) for w, h in r], lambda g: [(int(g.integers(10)), [1.0, 2.0]) for _ in "ab"]),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_requests_of_a_shape_are_unfolded_twice_and_then_stand_as_templates(
    serve: Callable[..., Serving], form: str
) -> None:
    does, make = FORMS[form]
    rng, serving = np.random.default_rng(0), serve(does)
    kinds = [type(serving.ask(make(rng))) for _ in range(12)]
    assert kinds[:2] == [Unfolding, Unfolding]
    assert kinds[2:] == [Template] * 10
    assert serving.templates.num_templates == 1


def test_requests_of_a_shape_that_come_together_prove_its_template_once(
    serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    proved = list[Template]()

    def proving(*given: Any) -> Template:
        proved.append(prove(*given))
        return proved[-1]

    monkeypatch.setattr(template_cache, "prove", proving)
    serving = serve(lambda m, r: m.look.run(r))
    serving.ask_together([[k % 10, 2, 3] for k in range(20)])
    assert serving.ask([4, 5, 6]) is proved[0]
    assert len(proved) == 1


TEXT = "{0.name}"
LOOKS: dict[str, Callable[..., Any]] = {
    "compares": lambda m, r: m.look.run(r if r[0] > 3 else r[:1]),
    "converts": lambda m, r: m.look.run([int(word) for word in r]),
    "array": lambda m, r: m.look.run(np.asarray(r)),
    "tensor": lambda m, r: m.look.run(torch.tensor(r)),
    "sorts": lambda m, r: m.look.run(sorted(r)),
    "counts": lambda m, r: m.look.run(list(range(1 + r[0] % 2))),
    "sums": lambda m, r: m.look.run(r, ([float(sum(r)), 0.0],)),
    "hands back": lambda m, r: {"words": r, "h": m.look.run(r)},
    "an array": lambda m, r: {"one": np.ones(2), "h": m.look.run(r)},
    "writes": lambda m, r: (setattr(m, "calls", m.calls + 1), m.look.run(r))[1],
    "reads what it is not told of": lambda m, r: m.look.run(r, ([0.0, float(np.random.rand())],)),
    "changes the request": lambda m, r: (r.append(7), m.look.run(r))[1],
    "changes a part of it": lambda m, r: (r.insert(0, r.pop()), m.look.run(r))[1],
    "formats": lambda m, r: m.look.run(r[: len(TEXT.format(m.look))]),
    "swallows": lambda m, r: m.look.run(r[: swallowed(r)]),
}  # fmt: skip


def swallowed(request: Any) -> int:
    try:
        return 1 + int(request[0]) % 2
    except BaseException:
        return 1


@pytest.mark.parametrize("looks", LOOKS)
def test_functions_that_look_at_values_or_act_have_no_templates(serve: Callable[..., Serving], looks: str) -> None:
    serving = serve(LOOKS[looks])
    assert not serving.has_template(*[[1 + i, 2, 3] for i in range(6)])
    assert serving.templates.num_templates == 0
    assert serving.model.calls in (0, 6)


class Waits(Shapes):
    def unfold(self, request: Any) -> Any:
        yield self.look.run(request)


def test_a_function_that_waits_has_no_template(serve: Callable[..., Serving]) -> None:
    serving = serve(None, Waits(len))
    serving.ask([1])
    serving.ask([2])
    assert serving.ask([3]) is not None
    assert serving.templates.num_templates == 0


def test_a_model_that_changes_its_mind_is_asked_again(serve: Callable[..., Serving]) -> None:
    serving = serve(lambda m, r: m.look.run(r[: m.calls + 1]))
    assert serving.has_template(*[[1, 2, 3]] * 5)
    serving.model.calls = 1
    answer = serving.ask([1, 2, 3])
    assert type(answer) is Unfolding
    assert answer.graph.num_nodes == 2
    assert serving.has_template(*[[1, 2, 3]] * 4)


WRONG: list[Any] = [[1, 2, 10], [1, -1, 2], [1, 2, 2**70], [1, 2, 2**63], [1.0, 2.0, 3.0], [1, 2, "a"]]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_request_is_refused_as_if_there_were_no_template(serve: Callable[..., Serving], wrong: Any) -> None:
    serving = serve(FORMS["chain"][0])
    assert serving.has_template(*[[1, 2, 3]] * 5)
    with pytest.raises(Exception) as found:  # noqa: PT011 - whatever it is, it must be the same
        serving.ask(wrong)
    with pytest.raises(type(found.value)) as expected:
        Unfolding(serving.model, serving.types, wrong).start()
    assert str(found.value) == str(expected.value)


def test_templates_are_bounded_by_number_and_by_nodes(
    serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_cache, "MAX_TEMPLATES", 4)
    monkeypatch.setattr(template_cache, "MAX_NODES", 80)
    monkeypatch.setattr(template_cache, "MAX_SHAPES", 12)
    serving = serve(lambda m, r: m.look.run(r))
    most = 0
    for length in [*range(1, 30), *range(1, 30)]:
        for _ in range(3):
            serving.ask([1] * length)
        assert serving.templates.num_templates <= 4
        assert serving.templates.num_nodes <= 80
        most = max(most, serving.templates.num_templates)
    assert most == 4


def test_a_model_without_templates_is_not_asked_for_ever(serve: Callable[..., Serving]) -> None:
    serving = serve(LOOKS["compares"])
    for length in range(1, template_cache.REFUSALS + 1):
        assert serving.templates.look([(0, [5] * length, None)]) != [None]
        serving.ask([5] * length)
        serving.ask([5] * length)
    assert serving.templates.look([(0, [5], None)]) == [None]


def test_shapes_that_never_come_again_are_soon_asked_for_rarely(serve: Callable[..., Serving]) -> None:
    serving = serve(lambda m, r: m.look.run(r))
    sights = [serving.templates.look([(0, [1] * length, None)])[0] for length in range(1, template_cache.MISSES + 641)]
    assert None not in sights[: template_cache.MISSES]
    assert sum(sight is not None for sight in sights[template_cache.MISSES :]) == 10
    for _ in range(4 * template_cache.ASKED):  # one shape again and again
        serving.ask([1, 2, 3])
    assert serving.templates.num_templates == 1
    assert all(serving.templates.look([(0, [1, 2, 3], None)])[0] for _ in range(template_cache.ASKED))


def test_all_of_many_requests_that_come_together_have_the_template_of_their_shape(
    serve: Callable[..., Serving],
) -> None:
    serving = serve(lambda m, r: m.look.run(r))
    for _ in range(2):
        serving.ask([1, 2, 3])
    sights = serving.templates.look([(0, [1, 2, 3], None)] * (2 * template_cache.MISSES))
    assert all(sight is not None and sight[2] is not None for sight in sights)


CHUNKS: dict[str, Callable[..., Any]] = {
    "one value": lambda m, c, s: 2 * (m.look.run(c, ([0.0, 0.0] if s is None else s,)),),
    "a dict": lambda m, c, s: (
        (h := m.look.run(c, ([0.0, 0.0] if s is None else s["h"][0],))), {"h": [h], "steps": h.steps, "name": "a"}
    ),
    "kept as it is": lambda m, c, s: (m.look.run(c), m.add.map(c_rows(c), c_rows(c)) if s is None else s),
}  # fmt: skip


def c_rows(chunk: Any) -> Any:
    return [[0.5, 0.25]] * len(chunk)


@pytest.mark.parametrize("chunks", CHUNKS)
def test_chunks_go_on_from_the_state_of_a_template(serve: Callable[..., Serving], chunks: str) -> None:
    serving = serve(CHUNKS[chunks])
    kinds = []
    for sequence in range(8):
        state = KeptState()
        for chunk in range(4):
            answer = serving.ask([sequence, chunk], serving.templates.canonical(state))
            kinds.append(type(answer))
            state = answer.after
    assert kinds.count(Template) > 12
    assert serving.templates.num_templates == 2


def test_a_state_that_could_change_has_no_template(serve: Callable[..., Serving]) -> None:
    def does(m: Any, chunk: Any, state: Any) -> Any:
        h = m.look.run(chunk, ([0.0, 0.0] if state is None else state["h"],))
        return h, {"h": h, "seen": np.zeros(2)}

    serving, state = serve(does), KeptState()
    for chunk in range(8):
        state = serving.ask([chunk], serving.templates.canonical(state)).after
    assert serving.templates.num_templates == 0


@st.composite
def programs(draw: Any) -> Callable[..., Any]:
    """Random functions of lists of words that look at no value: chains, maps and calls on parts of what there is."""
    ops = draw(st.lists(st.tuples(st.sampled_from("rmcs"), st.integers(0, 3), st.booleans()), min_size=1, max_size=6))

    def does(m: Any, words: Any) -> Any:
        made: list[Any] = []
        for op, at, backwards in ops:
            part = list(words[at % len(words) :])
            part = part[::-1] if backwards else part
            if op == "r":
                made.append(m.look.run(part, made[-1] if made and backwards else None))
            elif op == "m":
                made.append(m.look.map(part, [[1.0, 2.0]] * len(part))[at % len(part)])
            elif op == "c":
                made.append(m.look(part[0] if backwards else 7, made[at] if at < len(made) else [0.0, 1.0]))
            elif made:
                made.append(m.add(made[-1], made[at % len(made)]))
        return made

    return does


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(does=programs(), lengths=st.lists(st.integers(1, 3), min_size=3, max_size=12), seed=st.integers(0, 999))
def test_with_templates_is_as_recorded_anew(
    serve: Callable[..., Serving], does: Callable[..., Any], lengths: list[int], seed: int
) -> None:
    rng, serving = np.random.default_rng(seed), serve(does)
    for length in lengths:
        serving.ask(rng.integers(0, 10, length).tolist())  # which compares
    proved = {length for length in lengths if lengths.count(length) > 1}
    assert serving.templates.num_templates == len(proved)


@pytest.mark.slow
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    order=st.randoms(use_true_random=False),
    form=st.sampled_from(["chain", "framed", "calls", "reversed", "last two"]),
)
def test_values_of_many_requests_are_laid_out_as_those_of_each(
    serve: Callable[..., Serving], lengths: list[int], order: Any, form: str
) -> None:
    serving, rng = serve(FORMS[form][0]), np.random.default_rng(0)
    for length in range(1, 5):
        for _ in range(2):
            serving.ask(rng.integers(0, 10, length).tolist())
    requests = [rng.integers(0, 10, length).tolist() for length in lengths]
    sights = serving.templates.look([(0, request, None) for request in requests])
    groups: dict[Any, list[int]] = {}
    for i, sight in enumerate(sights):
        groups.setdefault(sight[2].form, []).append(i)  # type: ignore[index,union-attr]
    for members in groups.values():
        templates, leaves = [sights[i][2] for i in members], [sights[i][1] for i in members]  # type: ignore[index]
        together, wrong = gather(templates, leaves)  # type: ignore[arg-type]
        assert together is not None
        assert not wrong
        some = order.sample(range(len(members)), order.randint(1, len(members)))
        bases = [100 * (place + 1) for place in some]
        for feed in range(len(templates[0].feeds)):  # type: ignore[union-attr]
            rows, values = together.rows(feed, some, bases)
            found = dict(zip(np.r_[rows].tolist(), torch.as_tensor(values).tolist(), strict=True))
            for place, base in zip(some, bases, strict=True):
                alone, _ = gather([templates[place]], [leaves[place]])  # type: ignore[list-item]
                assert alone is not None
                of_one, wanted = alone.rows(feed, (0,), (base,))
                for row, value in zip(np.r_[of_one].tolist(), torch.as_tensor(wanted).tolist(), strict=True):
                    assert found.pop(row) == value
            assert not found


@pytest.mark.parametrize("form", ["chain", "framed", "calls", "reversed"])
def test_requests_of_several_lengths_are_laid_out_in_one_go(serve: Callable[..., Serving], form: str) -> None:
    serving = serve(FORMS[form][0])
    requests = [list(range(length)) for length in (2, 3, 7)]
    for request in requests * 2:
        serving.ask(request)
    sights = serving.templates.look([(0, request, None) for request in requests])
    assert len({sight[2].form for sight in sights}) == 1  # type: ignore[index,union-attr]
