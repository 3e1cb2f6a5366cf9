"""Several models in one engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_models import (
    END,
    Accumulate,
    Count,
    Counter,
    Decode,
    Encode,
    LoopTranslator,
    Sums,
    assert_balanced,
    translate,
)

import batchmaker as bm
from batchmaker.engine import StepSeen
from batchmaker.errors import ModelError, OptionError


class Product(bm.Model):
    """Products of numbers, with cells named as those of Sums."""

    def __init__(self) -> None:
        self.add = bm.Cell(Times())

    def unfold(self, xs: Any) -> Any:
        return self.add.run([[float(x)] for x in xs], ([1.0],))

    def batched(self, requests: Any) -> list[Any]:
        return [torch.tensor(xs).prod() for xs in requests]


class Times(Accumulate):
    def forward(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return total * x


class Whole(Sums):
    def batched(self, requests: Any) -> list[Any]:
        return [torch.tensor(xs).sum() for xs in requests]


@pytest.mark.parametrize("workers", [1, 2])
def test_each_request_is_answered_by_its_own_model(workers: int) -> None:
    torch.manual_seed(3)
    encode, decode = Encode(), Decode()
    models = {"translate": LoopTranslator(encode, decode), "sum": Sums(), "product": Product(), "count": Counter()}
    with bm.Engine(models, threads=1, workers=workers) as engine:
        futures = [
            engine.submit(request, model=name)
            for request, name in [([5, 7], "translate"), ([2, 3, 4], "sum"), ([2, 3, 4], "product"), (3, "count")] * 5
        ]
        words, total, product, counted = (future.result(60) for future in futures[-4:])
        assert words.tolist() == translate(encode, decode, [5, 7])
        assert END not in words[:-1]
        assert (float(total), float(product), counted) == (9.0, 24.0, [1, 2, 3])
        assert [float(x) for x in engine.map([[1, 2], [3]], model="sum", progress=False)] == [3.0, 3.0]
        assert list(engine.submit(2, model="count", stream=True)) == [1, 2]
        names = {cell.name for cell in engine.registry.types}
    assert names == {"translate/encoder", "translate/decoder", "sum/add", "product/add", "count/count"}
    assert engine.service["sum"].answered == 7
    assert_balanced(engine)


def test_a_single_model_need_not_be_named_and_its_cells_keep_their_names() -> None:
    with bm.Engine({"sum": Sums()}, threads=1) as engine:
        assert float(engine.submit([1, 2]).result(60)) == 3.0
        assert float(engine.submit([1, 2], model="sum").result(60)) == 3.0
        assert [cell.name for cell in engine.registry.types] == ["add"]


def test_equal_cells_of_two_models_run_together() -> None:
    seen: list[StepSeen] = []
    with bm.Engine({"one": Sums(batch_sizes=[8]), "other": Sums(batch_sizes=[8])}, threads=1) as engine:
        engine.observe(seen.append)
        futures = [engine.submit([1] * 40, model=name) for name in ("one", "other") * 4]
        assert {float(future.result(60)) for future in futures} == {40.0}
    assert len(engine.registry.types) == 1
    assert {step.cell for step in seen} == {"one/add"}
    assert any(len(set(step.requests)) > 1 for step in seen)


def test_a_request_without_a_model_is_told_which_there_are() -> None:
    with bm.Engine({"sum": Sums(), "product": Product()}, threads=1) as engine:
        with pytest.raises(OptionError, match="several models; give model=, one of sum, product"):
            engine.submit([1])
        with pytest.raises(OptionError, match=r"known: product, sum\. Did you mean 'sum'"):
            engine.submit([1], model="summ")


@pytest.mark.parametrize(
    ("models", "message"), [({}, "empty mapping"), ({"a/b": Sums()}, "without '/'"), ({"": Sums()}, "without '/'")]
)
def test_models_need_plain_names(models: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        bm.Engine(models)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ModelError, match=r"model 'x': an engine serves a batchmaker\.Model, got int"):
        bm.Engine({"x": 3})  # type: ignore[dict-item]


def test_every_models_example_is_proved_at_the_start() -> None:
    good, bad = Sums(), Product()
    good.example_request, bad.example_request = [1, 2], ["no number"]
    with pytest.raises(ModelError, match="example request of model 'bad' failed"):
        bm.Engine({"good": good, "bad": bad}, threads=1).start()
    bad.example_request = [2, 2]
    with bm.Engine({"good": good, "bad": bad}, threads=1) as engine:
        assert [cell.name for cell in engine.registry.types] == ["good/add", "bad/add"]
        assert [service.answered for service in engine.service.values()] == [0, 0]


@pytest.mark.parametrize("policy", ["padded", "serial"])
def test_whole_requests_of_two_models_never_share_a_batch(policy: str) -> None:
    batches: list[StepSeen] = []
    with bm.Engine({"sum": Whole(), "product": Product()}, policy, threads=1) as engine:
        engine.observe(batches.append)
        named = [("sum" if n % 3 else "product", [float(n), 2.0]) for n in range(30)]
        futures = [engine.submit(xs, model=name) for name, xs in named]
        answers = [float(future.result(60)) for future in futures]
    assert answers == [xs[0] + 2 if name == "sum" else 2 * xs[0] for name, xs in named]
    for batch in batches:
        assert len({named[request][0] for request in batch.requests if request is not None}) == 1
    assert sum(len(batch.requests) for batch in batches) == 30


class Growing(bm.Model):
    """Counts on from n in one cell, and from there in two others, which are not known before."""

    def __init__(self) -> None:
        self.first, self.left, self.right = (
            bm.Cell(Count(), host_outputs=(0,), priority=number) for number in range(3)
        )

    def unfold(self, n: int) -> Any:
        known = yield self.first(n)
        left, right = self.left.loop((known,), max_steps=3), self.right.loop((known,), max_steps=3)
        return [left, right]


@pytest.mark.parametrize("policy", sorted({*bm.policies.POLICIES} - {"learned"}))
def test_cells_that_are_first_used_while_nobody_waits_in_line_are_known_to_the_policy(policy: str) -> None:
    with bm.Engine({"grow": Growing(), "sum": Sums()}, policy, threads=1) as engine:
        total = engine.submit([1, 2], model="sum")  # so that there are two models
        grown = [engine.submit(n, model="grow") for n in (1, 5)]
        assert [one.result(60) for one in grown] == [[5, 5], [9, 9]]
        assert float(total.result(60)) == 3.0
    assert_balanced(engine)
