"""papers/benchmarks/ed_batch_throughput.py without measuring: what is missing, ratios, tables, picture, and cells."""

from __future__ import annotations

import argparse
import importlib
import math
import shutil
from pathlib import Path

import pytest

import batchmaker as bm
from batchmaker.compile.binding import bind
from batchmaker.graph.spec import ValueSpec
from batchmaker.lab.zoo import make
from benchmark_scripts import ROOT, imported


@pytest.fixture
def scripts():
    with imported("ed_batch_throughput", "throughput_page", "gate_by_gate") as found:
        yield list(found.values())


def row(order, cells, per_s, seen=None):
    return {
        "order": order, "cells": cells, "size": 64, "seen": seen or {}, "per_s": per_s, "steps": 10,
        "cells_per_step": 7.4, "shares": {"busy_s": 0.5, "scheduler_s": 0.25, "unfold_s": 0.125},
        "scheduler_us_per_step": 99.6,
    }  # fmt: skip


def measured(workload="treelstm", *more, **facts):
    rows = [
        row("agenda", "bound", 100.0, {"8": 50.0, "64": 100.0}), row("depth", "bound", 80.0, {"8": 60.0, "64": 80.0}),
        row("sufficient", "bound", 140.0), row("learned", "bound", 120.0, {"8": 90.0, "64": 120.0}), *more,
    ]  # fmt: skip
    return {"workload": workload, "orders": rows, **facts}


def test_ratios_are_over_the_better_of_dynets_orders_with_the_cells_that_are_compared(scripts):
    _, page, _ = scripts
    more = (row("agenda", "planned", 125.0), row("learned", "planned", 150.0), row("depth", "gates", 75.0))
    assert list(page.ratios(measured("treelstm", *more)).values()) == pytest.approx([1.2, 1.4, 1.2, 1.25, 1.5, 2.0])


def test_what_was_not_measured_is_told_apart_from_zero(scripts):
    _, page, _ = scripts
    found = page.ratios(measured())
    assert [math.isnan(value) for value in found.values()] == [False, False, True, True, True, True]
    last = page.ratios_table([measured()]).splitlines()[-1]
    assert last == "| treelstm | 1.20 | 1.40 | - | - | - | - | 1.3 |"


def test_rates_name_the_size_of_the_mini_batch_and_leave_out_what_was_not_measured(scripts):
    _, page, _ = scripts
    head, _, line = page.rates_table([measured()], "bound").splitlines()
    assert head == "| workload | agenda | depth | agenda-remaining | sufficient | learned | learned, 5 steps |"
    assert line == "| treelstm | 100 (64) | 80 (64) | - | 140 (64) | 120 (64) | - |"


def test_at_each_size_the_learnt_order_is_compared_with_the_better_of_the_two_there(scripts):
    _, page, _ = scripts
    assert page.sizes_table([measured()]).splitlines()[-1] == "| treelstm | - | 1.50 | - | - | 1.20 | - | - |"


def test_shares_are_of_the_better_of_dynets_orders_and_the_learnt_one(scripts):
    _, page, _ = scripts
    assert page.shares_table([measured()]).splitlines()[2:] == [
        f"| treelstm | {order} | 64 | 10 | 7 | 50% | 25% | 12% | 100 |" for order in ("agenda", "learned")
    ]


def test_dynets_best_with_and_without_building_may_be_of_different_sizes(scripts):
    _, page, _ = scripts
    theirs = [
        {"workload": "treelstm", "build": "D", "strategy": "agenda", "size": size, "per_s": per_s,
         "per_s_without_building": alone}
        for size, per_s, alone in ((64, 1750.0, 2000.0), (128, 1700.0, 2200.0))
    ]  # fmt: skip
    ours = [{"workload": "treelstm", "orders": [row("agenda", "planned", 1500.0)]}]
    assert page.peer_table({"ours": ours, "dynet": theirs}).splitlines()[2:] == [
        "| here, agenda, planned | treelstm | 64 | 1,500 |  |",
        "| D, agenda | treelstm | 64 | 1,750 | 2,200 |",
    ]


def test_only_workloads_that_the_file_does_not_have_of_this_code_are_measured(scripts):
    main, _, _ = scripts
    made = [
        measured("treelstm", digest="this", rounds=5), measured("treegru", digest="other", rounds=5),
        measured("mvrnn", digest="this", rounds=3), measured("latticelstm"),
    ]  # fmt: skip
    names = ["mvrnn", "treelstm", "treegru", "latticelstm", "lstm-nmt"]
    assert main.missing({"results": made}, names, 5, "this") == ["mvrnn", "treegru", "latticelstm", "lstm-nmt"]


def test_results_are_kept_as_they_come_and_replace_those_of_their_workload(scripts, tmp_path):
    main, _, _ = scripts
    options = argparse.Namespace(json=tmp_path / "found.json", rounds=5, quick=False)
    provenance = importlib.import_module("provenance")
    code = provenance.digest(main.MEASURES)
    for result in (measured("treelstm", n=1), measured("bilstm-tagger", n=2), measured("treelstm", n=3)):
        main.keep({"results": [{**result, "digest": code}]}, options)
    main.keep({"peer": {"ours": [], "dynet": [], "digest": code}}, options)
    found = main.read(options.json)
    assert provenance.is_current(found)
    assert [(result["workload"], result["n"]) for result in found["results"]] == [("bilstm-tagger", 2), ("treelstm", 3)]
    assert found["rounds"] == 5
    assert main.read(tmp_path / "none.json") == {"results": []}
    main.keep({"results": [measured("treelstm", digest="other")]}, options)
    assert not provenance.is_current(main.read(options.json))


@pytest.mark.slow
def test_the_page_is_filled_and_the_picture_drawn(scripts, tmp_path):
    main, page, _ = scripts
    options = argparse.Namespace(json=tmp_path / "found.json", rounds=5, quick=False)
    main.keep({"results": [measured(), measured("lstm-nmt", row("agenda", "gates", 40.0))]}, options)
    copied = Path(shutil.copy(ROOT / "papers" / "docs" / "ed-batch-throughput.md", tmp_path / "page.md"))
    page.show(main.read(options.json), copied, tmp_path / "bars.png")
    assert "| lstm-nmt | 40 (64) | - |" in copied.read_text("utf-8")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_orders_with_cells_gate_by_gate_are_dynets_alone(scripts):
    main, page, _ = scripts
    kinds = {cells for _, cells in main.orders_of("treelstm")}
    assert kinds == {"bound", "planned", "gates"}
    assert [order for order, cells in main.orders_of("treelstm") if cells == "gates"] == list(page.HEURISTICS)
    assert (page.TASKS, "bound") in main.orders_of("lstm-nmt")


TREE = {"words": [1, 2, 3], "children": [[0, 1], [3, 2]]}
LATTICE = {"arcs": [[0, 1, 1], [1, 2, 2], [0, 2, 3]]}
REQUESTS = {
    "treelstm": ({}, TREE),
    "treegru": ({}, TREE),
    "mvrnn": ({}, TREE),
    "bilstm-tagger": ({}, [1, 2, 3]),
    "seq2seq": ({}, {"source": [3, 4], "words": 2}),
    "latticelstm": ({"words": 5, "max_arity": 2}, LATTICE),
    "latticegru": ({"words": 5, "max_arity": 2}, LATTICE),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REQUESTS)
def test_cells_gate_by_gate_run_as_they_are_written_in_every_network(scripts, name):
    *_, gates = scripts
    options, request = REQUESTS[name]
    model = make(name, vocabulary_size=20, hidden=4, **options)
    written = gates.gate_by_gate(model, 4)
    with bm.Engine(model, threads=1) as engine, bm.Engine(written, threads=1) as other:
        assert len(other.map([request], progress=False)[0]) == len(engine.map([request], progress=False)[0])
    replaced = {name for name, cell in written.cells.items() if cell is not model.cells[name]}
    assert replaced <= {"leaf", "inner", "forwards", "backwards", "encoder", "decoder", "character", "word"}
    assert len(replaced) >= 1


def test_a_cell_gate_by_gate_is_left_as_it_is(scripts):
    *_, gates = scripts
    cell = gates.gate_by_gate(make("treelstm", vocabulary_size=20, hidden=4), 4).cells["leaf"]
    bound = bind(cell.module, (ValueSpec((), "int64"),), name="leaf")
    assert bound.notes[0].startswith("left as it is")
