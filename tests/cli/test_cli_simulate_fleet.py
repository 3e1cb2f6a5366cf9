"""`batchmaker simulate --replicas`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import Result

from batchmaker.cli.simulate.fleet import unit_work_ns
from batchmaker.cost.latency import CellLatency, LatencyTable
from batchmaker.cost.lengths import LengthProfile
from batchmaker.cost.profile import CostProfile, PredictedLength, ProfileOptions
from batchmaker.errors import OptionError
from batchmaker.lab import zoo
from batchmaker.lab.simulator.costs import StepCosts
from batchmaker.lab.simulator.simulate import SimulatedDevice
from batchmaker.lab.zoo.blueprint import blueprint

Command = Callable[..., Result]
SMALL = ("--hidden", 8, "--requests", 120, "--max-batch", 4, "--npu", "--rate", 20000)


def test_routers_and_sizes_of_a_fleet_are_compared(command: Command, tmp_path: Path, read_json: Any) -> None:
    out, png = tmp_path / "out.json", tmp_path / "out.png"
    done = command(
        "simulate", "lstm", *SMALL, "--replicas", 2, "--replicas", 3, "--router", "least-work", "--router", "random",
        "--seeds", 2, "--sla-ms", 1, "--sla-ms", 20, "--json", out, "--png", png,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    results = read_json(out)
    assert len(results) == 2 * 2 * 2 * 2
    assert {row["fidelity"] for row in results} == {"exact"}
    assert {row["answered"] for row in results} == {120}
    assert {(row["replicas"], row["mean_replicas"]) for row in results} == {(2, 2.0), (3, 3.0)}
    assert "least-work" in done.stdout
    assert png.stat().st_size > 10_000


@pytest.mark.slow
def test_fast_and_exact_write_the_same_numbers(command: Command, tmp_path: Path, read_json: Any) -> None:
    written = []
    for fidelity in ("exact", "fast"):
        out = tmp_path / f"{fidelity}.json"
        done = command(
            "simulate", "lstm", *SMALL, "--replicas", 3, "--router", "two-choices", "--lengths", "europarl",
            "--fidelity", fidelity, "--mean-life-s", 0.01, "--start-s", 0.001, "--json", out,
        )  # fmt: skip
        assert done.exit_code == 0, done.output
        (row,) = read_json(out)
        assert row.pop("fidelity") == fidelity
        written.append(row)
    assert written[0]["deaths"] > 0
    for key, value in written[0].items():
        assert written[1][key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key


@pytest.mark.slow
def test_a_fleet_scales_with_seasons_and_bursts(command: Command, tmp_path: Path, read_json: Any) -> None:
    out = tmp_path / "out.json"
    done = command(
        "simulate", "lstm", "--hidden", 8, "--max-batch", 4, "--npu", "--rate", 50000, "--requests", 20000,
        "--replicas", 1, "--router", "least-work", "--autoscale", "work:target=0.0005,most=9,every_s=0.005,cool_s=0.02",
        "--start-s", 0.005, "--arrivals", "mmpp", "--burst-s", 0.02, "--season", 0.9, "--day-s", 0.2, "--json", out,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    (row,) = read_json(out)
    assert row["fidelity"] == "fast"
    assert row["most_replicas"] > 2
    assert row["answered"] == 20000
    assert row["arrivals"] == "mmpp, bursts of 0.02 s, season of 90% in 0.2 s"


def test_sequences_stay_where_they_began(command: Command, tmp_path: Path, read_json: Any) -> None:
    out = tmp_path / "out.json"
    done = command(
        "simulate", "lstm", *SMALL, "--replicas", 3, "--chunks", 10, "--chunk-gap-ms", 2, "--autoscale",
        "sequences:target=2,every_s=0.002", "--json", out,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    (row,) = read_json(out)
    assert (row["router"], row["answered"]) == ("sticky", 120)


def test_a_model_with_loops_is_simulated_exactly(command: Command, tmp_path: Path, read_json: Any) -> None:
    out = tmp_path / "out.json"
    done = command("simulate", "seq2seq", *SMALL, "--replicas", 2, "--router", "least-work", "--json", out)
    assert done.exit_code == 0, done.output
    assert read_json(out)[0]["fidelity"] == "exact"


def test_work_that_a_value_ends_is_guessed_by_what_is_known_of_lengths() -> None:
    plan = blueprint("seq2seq", lambda: zoo.make("seq2seq", hidden=8, max_batch=4))
    shapes = [plan.sized(7, 5), plan.sized(7, 9)]
    latency = LatencyTable(
        tuple(CellLatency(cell.name, (1, 4), (1e-3, 4e-3), (1e-3, 4e-3)) for cell in plan.model.cells)
    )
    lengths = (PredictedLength("decoder", "encoder", LengthProfile.from_pairs([7] * 50, [6] * 50)),)
    profile = CostProfile("seq2seq", ProfileOptions("float32", 1, "a machine", "none"), latency, lengths)
    seconds = np.tile([0.0, 1e-3, 2e-3, 3e-3, 4e-3], (2, 1))
    true, known = unit_work_ns(plan.model, profile, SimulatedDevice(StepCosts(seconds)), shapes)
    assert true.tolist() == [12_000_000, 16_000_000]
    assert known.tolist() == [13_000_000, 13_000_000]


def test_a_router_knows_of_requests_that_decide_what_they_take_on_average() -> None:
    make = partial(zoo.make, "early-exit", width=8, layers=4, max_batch=4)
    plan = blueprint("early-exit", make, computes=True)
    shapes = [plan.request(request) for request in np.random.default_rng(0).normal(size=(12, 8))]
    latency = LatencyTable(
        tuple(CellLatency(cell.name, (1, 4), (1e-3, 4e-3), (1e-3, 4e-3)) for cell in plan.model.cells)
    )
    profile = CostProfile("early-exit", ProfileOptions("float32", 1, "a machine", "none"), latency)
    seconds = np.tile([0.0, 1e-3, 2e-3, 3e-3, 4e-3], (len(plan.model.cells), 1))
    true, known = unit_work_ns(plan.model, profile, SimulatedDevice(StepCosts(seconds)), shapes)
    assert true.tolist() == [1_000_000 * int(shape.work.nodes.sum()) for shape in shapes]
    assert len(set(true.tolist())) > 2
    assert known.tolist() == [round(true.mean())] * 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--router", "least-work"), "--router is for a fleet"),
        (("--length-error", 0.5), "--length-error is for a fleet"),
        (("--replicas", 2, "--router", "least-wrok"), "least-work"),
        (("--replicas", 2, "--router", "random", "--router", "random"), "given twice"),
        (("--replicas", 2, "--fidelity", "quick"), "fidelity"),
        (("--replicas", 2, "--router", "sticky"), "--chunks"),
        (("--replicas", 2, "--router", "random", "--chunks", 3), "--router random would leave it"),
        (("--replicas", 2, "--autoscale", "sequences:target=3"), "there are none"),
        (("--replicas", 2, "--autoscale", "work"), "needs a target"),
        (("--replicas", 2, "--mean-life-s", 0), "--mean-life-s"),
        (("--replicas", 2, "--give-up"), "--give-up"),
        (("--replicas", 2, "--jobs", 2), "--jobs"),
        (("--replicas", 2, "--policy", "serial"), "batches whole requests"),
        (("--replicas", 2, "--policy", "cellular", "--policy", "agenda"), "one policy"),
        (("--replicas", 2, "--workers", 2, "--fidelity", "fast"), "one worker"),
        (("--replicas", 2, "--policy", "agenda", "--fidelity", "fast"), "agenda"),
        (("--burst-s", 1), "--arrivals mmpp"),
        (("--lengths", "long"), "lengths"),
    ],
)
def test_what_makes_no_sense_for_a_fleet_is_refused(command: Command, options: Any, message: str) -> None:
    done = command("simulate", "lstm", *SMALL, *options)
    assert isinstance(done.exception, OptionError), done.output
    assert message in str(done.exception)
