"""What a policy that forecasts is told when the engine starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from engine_models import Decode, Encode, LoopTranslator, Sums, Watching

import batchmaker as bm
from batchmaker.cost import CellLatency, CostProfile, LatencyTable, LengthProfile, PredictedLength, ProfileOptions
from batchmaker.errors import RefusedError, SavedModelError
from batchmaker.executor.null import NullExecutor
from batchmaker.policies.lazy import LazyPolicy


class Listener(Watching):
    """Keeps what it is told."""

    wants_costs: ClassVar[bool] = True

    def __init__(self) -> None:
        self.told: list[CostProfile] = []

    def use_profile(self, profile: CostProfile) -> None:
        self.told.append(profile)


def stored(cell: str, seconds: float, given: str | None = None) -> CostProfile:
    options = ProfileOptions("float32", 1, "a machine", "a commit")
    latency = LatencyTable(
        tuple(CellLatency(name, (1, 8), (seconds, seconds), (seconds, seconds)) for name in {cell, given or cell})
    )
    lengths = (PredictedLength(cell, given, LengthProfile.from_pairs([3] * 30, [5] * 30)),)
    return CostProfile("stored", options, latency, lengths)


def with_example(model: Any, example: Any, profile: CostProfile | None = None) -> Any:
    model.example_request, model.profile = example, profile
    return model


def told(models: Any, **options: Any) -> list[CostProfile]:
    policy = Listener()
    with bm.Engine(models, policy, threads=1, **options) as engine:
        engine.submit([1, 2], model="sum" if isinstance(models, dict) else None).exception(60)
    return policy.told


def test_cells_are_measured_where_nothing_is_known() -> None:
    (profile,) = told(with_example(Sums(max_batch=64), [1, 2]))
    (cell,) = profile.latency.cells
    assert cell.name == "add"
    assert (cell.batch[0], cell.batch[-1]) == (1, 64)
    assert len(cell.batch) <= 8
    assert profile.lengths == ()


def test_a_stored_profile_is_handed_on_as_it_is() -> None:
    profile = stored("add", 0.25)
    for example in (None, [1]):
        (used,) = told(with_example(Sums(), example, profile))
        assert (used.latency, used.lengths, used.options) == (profile.latency, profile.lengths, profile.options)


def test_profiles_of_several_models_are_joined_under_the_cells_names() -> None:
    translator = with_example(LoopTranslator(Encode(), Decode()), [3, 4], stored("decoder", 0.5, "encoder"))
    (profile,) = told({"translate": translator, "sum": with_example(Sums(), [1])})
    assert {cell.name for cell in profile.latency.cells} == {"translate/decoder", "translate/encoder", "sum/add"}
    assert profile.latency.seconds("translate/decoder", 3) == 0.5
    assert [(known.cell, known.given) for known in profile.lengths] == [("translate/decoder", "translate/encoder")]


def test_nothing_is_measured_without_an_example_or_on_another_device() -> None:
    assert told(Sums()) == []
    assert told(with_example(Sums(), [1]), executor=NullExecutor(1)) == []


def test_a_request_that_the_profile_says_is_hopeless_is_refused() -> None:
    model = with_example(Sums(), None, stored("add", 10.0))
    with bm.Engine(model, LazyPolicy(hopeless="drop"), threads=1) as engine:
        with pytest.raises(RefusedError):
            engine.submit([1, 2], deadline_ms=15_000).result(60)
        assert float(engine.submit([1, 2], deadline_ms=60_000).result(60)) == 3.0
    assert engine.service["Sums"].refused == 1


def test_a_saved_model_keeps_its_deadline_and_its_profile(tmp_path: Path) -> None:
    model = with_example(Sums(), [1, 2], stored("add", 0.25))
    model.deadline_ms = 0.001  # saving runs the example, whatever its deadline
    bm.save(model, tmp_path / "saved")
    loaded = bm.load(tmp_path / "saved")
    assert loaded.deadline_ms == 0.001
    assert loaded.profile is not None
    assert loaded.profile.latency == model.profile.latency
    (tmp_path / "saved" / "profile.json").write_text("{}")
    with pytest.raises(SavedModelError, match=r"profile\.json: malformed"):
        bm.load(tmp_path / "saved")
    (tmp_path / "saved" / "profile.json").unlink()
    assert bm.load(tmp_path / "saved").profile is None


@pytest.mark.parametrize(
    ("sizes", "few"),
    [
        ((4,), (4,)),
        ((1, 2, 3, 4), (1, 2, 4)),
        ((*range(1, 33), 40, 48, 56, 64), (1, 2, 4, 8, 16, 32, 64)),
        ((3, 100), (3, 100)),
    ],
)
def test_few_sizes_are_measured(sizes: tuple[int, ...], few: tuple[int, ...]) -> None:
    (profile,) = told(with_example(Sums(batch_sizes=list(sizes)), [1, 2]))
    assert profile.latency.cells[0].batch == few
