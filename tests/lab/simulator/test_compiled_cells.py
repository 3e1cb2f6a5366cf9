"""The compiled loop gives every request the answer, and the time of it, that the scheduler itself gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_models import CHAIN, PAIR, cell_type, chain, costs, offered, pair

from batchmaker import policies
from batchmaker.cost.latency import CellLatency, LatencyTable
from batchmaker.cost.lengths import LengthProfile
from batchmaker.cost.profile import CostProfile, Overhead, PredictedLength, ProfileOptions
from batchmaker.engine.setup import wants_costs
from batchmaker.graph.recorder import Recorder
from batchmaker.graph.values import HostValues
from batchmaker.lab.simulator.cell_simulation import CellSimulation
from batchmaker.lab.simulator.compiled_cells import CompiledCells, compiled_cells
from batchmaker.lab.simulator.costs import SimulatedDevice, StepCosts
from batchmaker.lab.simulator.together import Together
from batchmaker.lab.simulator.workload import Offered, Records, SimulatedModel, SimulatedRequest
from batchmaker.policies.base import CellPolicy
from batchmaker.policies.cellular import CellularPolicy

OVERHEAD = Overhead(step_s=2e-3, row_s=1e-4, turn_s=3e-3, request_s=1e-3)
LAYERS = SimulatedModel(
    "layers",
    (
        cell_type(0, "left", 2, 1, (1, 2, 4)),
        cell_type(1, "right", 2, 1, (1, 4)),
        cell_type(2, "join", 2, 1, (1, 4), priority=2),
        cell_type(3, "decoder", 1, 1, (1, 4), priority=1),
    ),
)
"""Two chains at once, a single node that reads both, and a decoder."""
POLICIES = (
    "cellular", "cellular:max_steps=1", "cellular:max_steps=5", "lazy", "lazy:benefit=no", "lazy:max_steps=3",
    "lazy:slack=none,benefit=no", "lazy:slack=literal,benefit=no,lengths=fixed", "lazy:slack=oldest,lengths=fixed",
    "lazy:slack=literal,estimate=table,hopeless=veto", "lazy:lengths=true", "lazy:hopeless=veto", "lazy:stack=recent",
    "lazy:max_in_flight=3",
)  # fmt: skip


def layered(source: int, words: int) -> SimulatedRequest:
    recorder = Recorder()
    left, right = (recorder.run(cell, [HostValues(None, source, cell.inputs[0])], None)[0] for cell in LAYERS.cells[:2])
    joined = recorder.node(LAYERS.cells[2], [left, right])
    recorder.run(LAYERS.cells[3], [], [joined[0]], max_steps=words, open_ended=True)
    return SimulatedRequest(recorder.take(), source)


def profile_of(model: SimulatedModel, seconds: np.ndarray, seed: int) -> CostProfile:
    """What a policy is told: times that are a little off, and lengths of decoders."""
    rng = np.random.default_rng(seed)
    sizes = tuple(range(1, seconds.shape[1]))
    cells = tuple(
        CellLatency(cell.name, sizes, tuple(1.1 * seconds[i, 1:]), tuple(1.1 * seconds[i, 1:]))
        for i, cell in enumerate(model.cells)
    )
    source = rng.integers(1, 8, 60)
    lengths = tuple(
        PredictedLength(
            cell.name, cell.name.replace("decoder", "encoder" if "encoder" in model.cells[0].name else "left"),
            LengthProfile.from_pairs(source, np.maximum(source + rng.integers(-2, 3, 60), 1)),
        )
        for cell in model.cells if cell.name.endswith("decoder")
    )  # fmt: skip
    return CostProfile(model.name, ProfileOptions("float32", 1, "made up", ""), LatencyTable(cells), lengths)


def told(text: str, profile: CostProfile) -> CellPolicy:
    policy = policies.make(text)
    if wants_costs(policy):
        policy.use_profile(profile)
    assert isinstance(policy, CellPolicy)
    return policy


def assert_alike(one: Records, other: Records) -> None:
    assert one.started_s.tolist() == other.started_s.tolist()
    assert one.finished_s.tolist() == other.finished_s.tolist()
    assert (one.steps, one.rows) == (other.steps, other.rows)
    assert one.busy_s == other.busy_s


def play_both(
    model: SimulatedModel, text: str, play: Offered, device: StepCosts, profile: CostProfile, **options: Any
) -> None:
    overhead = options.pop("overhead", Overhead())
    fast = compiled_cells(model, told(text, profile), play, device.seconds, overhead=overhead, **options)
    assert isinstance(fast, CompiledCells), fast
    simulated = SimulatedDevice(device, overhead=overhead)
    exact = CellSimulation(model, told(text, profile), play, simulated, **options)
    assert_alike(fast.run(), exact.run())


OTHERS = {"cellular:max_steps=1", "lazy:benefit=no", "lazy:hopeless=veto"}
"""Each of their settings comes with another policy, too."""


@pytest.mark.parametrize("text", [pytest.param(text, marks=[pytest.mark.slow] * (text in OTHERS)) for text in POLICIES])
@settings(max_examples=5)
@given(seed=st.integers(0, 10_000))
def test_every_policy_gives_the_same_answers_compiled(text: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    model, form = (LAYERS, layered) if seed % 3 else (PAIR, pair)
    shapes = [form(int(rng.integers(1, 8)), int(rng.integers(1, 9))) for _ in range(9)]
    requests = [shapes[i] for i in rng.integers(0, len(shapes), 120)]
    play = offered(requests, np.cumsum(rng.exponential(rng.choice((0.01, 0.05, 0.2)), 120)).tolist())
    device = costs(model.cells, fixed_s=float(rng.uniform(1e-3, 2e-2)), per_row_s=float(rng.uniform(1e-3, 1e-2)))
    profile = profile_of(model, device.seconds, seed)
    options = {"sla_s": float(rng.choice((0.1, 0.4, 2.0))), "overhead": OVERHEAD if seed % 2 else Overhead()}
    play_both(model, text, play, device, profile, **options)


@pytest.mark.parametrize("text", ["auto", "auto:hopeless=ignore", "auto:max_steps=3"])
@settings(max_examples=5)
@given(seed=st.integers(0, 10_000), is_told=st.booleans(), has_sla=st.booleans())
def test_auto_gives_the_same_answers_compiled(text: str, seed: int, is_told: bool, has_sla: bool) -> None:
    rng = np.random.default_rng(seed)
    shapes = [pair(int(rng.integers(1, 8)), int(rng.integers(1, 9))) for _ in range(9)]
    requests = [shapes[i] for i in rng.integers(0, len(shapes), 120)]
    play = offered(requests, np.cumsum(rng.exponential(rng.choice((0.01, 0.05, 0.2)), 120)).tolist())
    device = costs(PAIR.cells, fixed_s=float(rng.uniform(1e-3, 2e-2)), per_row_s=float(rng.uniform(1e-3, 1e-2)))
    profile = profile_of(PAIR, device.seconds, seed)
    if not is_told:  # lengths are learnt from the runs that end
        profile = CostProfile(PAIR.name, profile.options, profile.latency)
    sla_s = float(rng.choice((0.1, 0.4, 2.0))) if has_sla else None
    play_both(PAIR, text, play, device, profile, sla_s=sla_s, overhead=OVERHEAD if seed % 2 else Overhead())


@pytest.mark.parametrize("text", ["lazy", "lazy:stack=recent", "lazy:slack=literal,benefit=no,lengths=fixed"])
def test_models_together_give_the_same_answers_compiled(text: str) -> None:
    rng = np.random.default_rng(0)
    both = Together([LAYERS, PAIR])
    forms = (layered, pair)
    requests = [
        both.request(which, forms[which](int(rng.integers(1, 8)), int(rng.integers(1, 9))))
        for which in rng.integers(0, 2, 200).tolist()
    ]
    device = costs(both.model.cells, fixed_s=0.01, per_row_s=0.004)
    parts = [profile_of(model, device.seconds, 1) for model in (LAYERS, PAIR)]
    play = offered(requests, np.cumsum(rng.exponential(0.05, 200)).tolist())
    play_both(both.model, text, play, device, both.profile(parts), sla_s=1.0)


def test_requests_that_come_at_one_time_give_the_same_answers_compiled() -> None:
    play = offered([layered(3, 2), layered(1, 5), layered(4, 4)] * 6, [0.0] * 9 + [0.5] * 9)
    device = costs(LAYERS.cells, fixed_s=0.01, per_row_s=0.003)
    for text in ("cellular", "lazy"):
        play_both(LAYERS, text, play, device, profile_of(LAYERS, device.seconds, 3), sla_s=1.0)


def test_a_type_that_is_passed_over_a_thousand_times_goes_first_compiled() -> None:
    """A stream of newcomers keeps the first cell busy; the second has the lower priority."""
    model = SimulatedModel(
        "pair", (cell_type(0, "encoder", 2, 1, (1, 2), priority=1), cell_type(1, "decoder", 1, 1, (1, 2)))
    )
    requests = [pair(2, 2) for _ in range(1500)]
    play = offered(requests, (0.01 * np.arange(1500)).tolist())
    device = costs(model.cells, fixed_s=0.02)
    play_both(model, "cellular:max_steps=1", play, device, profile_of(model, device.seconds, 0))


@pytest.mark.parametrize("text", ["cellular", "cellular:max_steps=1", "lazy"])
def test_several_runs_of_one_type_give_the_same_answers_compiled(text: str) -> None:
    rng = np.random.default_rng(2)

    def several(num: int) -> SimulatedRequest:
        recorder = Recorder()
        for _ in range(num):
            recorder.run(CHAIN.cells[0], [HostValues(None, num, CHAIN.cells[0].inputs[0])], None)
        return SimulatedRequest(recorder.take(), num)

    shapes = [several(num) for num in range(1, 7)]
    requests = [shapes[i] for i in rng.integers(0, len(shapes), 150)]
    play = offered(requests, np.cumsum(rng.exponential(0.02, 150)).tolist())
    device = costs(CHAIN.cells, fixed_s=0.004, per_row_s=0.002)
    play_both(CHAIN, text, play, device, profile_of(CHAIN, device.seconds, 3), sla_s=0.5)


def test_what_the_loop_does_not_know_is_left_to_the_scheduler() -> None:
    play, device = offered([chain(2)] * 3, [0.0] * 3), costs(CHAIN.cells)
    for policy, coming, why in (
        (policies.make("agenda"), play, "knows `cellular`, `lazy` and `auto`"),
        (policies.make("lazy"), play, "does not know the time"),
        (told("auto", profile_of(CHAIN, device.seconds, 0)), play, "with several cells"),
        (CellularPolicy(), offered([SimulatedRequest(Recorder().take(), 0)], [0.0]), "has no nodes"),
    ):
        assert isinstance(policy, CellPolicy)
        found = compiled_cells(CHAIN, policy, coming, device.seconds, overhead=Overhead())
        assert isinstance(found, str)
        assert why in found
