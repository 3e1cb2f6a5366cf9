"""benchmarks/gpu.py without a GPU: its sections' order and time, its arithmetic, tables and picture."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from batchmaker.cli.workload import make_workload
from batchmaker.clock import VirtualClock
from batchmaker.engine.engine import Engine
from batchmaker.executor.cuda.gpu import Gpu
from batchmaker.kernels.devices import H200
from insides import each_of

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch):
    pytest.importorskip("cuda.core", reason="needs the extra `cuda`")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return {
        name: importlib.import_module(name)
        for name in ("gpu", "gpu_kernels", "gpu_compile", "gpu_engine", "gpu_padded", "gpu_page")
    }


class Hand:
    """A clock that is moved by hand."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def test_a_section_that_fails_is_written_down_and_the_others_go_on(scripts, capsys):
    gpu, clock, flushed = scripts["gpu"], Hand(), []

    def fails(until):
        clock.now_s += 10
        raise RuntimeError("a bad launch\nand more")

    def works(until):
        clock.now_s += until.left_s
        assert until.passed
        return [{"x": 1}]

    wanted = [gpu.Section("a", 0.5, fails), gpu.Section("b", 0.5, works), gpu.Section("c", 0.5, works)]
    results = gpu.run_all(wanted, 100.0, lambda now: flushed.append(json.dumps(now)), clock)
    assert results["a"] == {"state": "failed: RuntimeError: a bad launch", "seconds": 10.0, "rows": []}
    assert results["b"]["rows"] == [{"x": 1}]
    assert [results[name]["seconds"] for name in "bc"] == [45.0, 45.0]  # what one leaves, the others share
    assert [len(json.loads(now)) for now in flushed] == [1, 1, 2, 2, 3, 3]
    assert json.loads(flushed[2])["b"]["state"] == "running"
    assert gpu.run_all(wanted, 0.0, flushed.append, clock)["c"]["state"] == "not run: out of time"


def test_nothing_more_is_begun_in_a_process_whose_device_is_broken(scripts):
    gpu, begun = scripts["gpu"], []

    def section(name):
        return gpu.Section(name, 0.3, lambda until: begun.append(name) or [])

    results = gpu.run_all(
        [section(name) for name in "abc"], 10.0, lambda now: None, Hand(), lambda: begun == ["a", "b"]
    )
    assert begun == list(results) == ["a", "b"]


class Played:
    """A worker that goes through what it was given: one look at it for each of `states`, and then it ends."""

    def __init__(self, clock, states, status):
        self.clock, self.states, self.status, self.killed = clock, states, status, False

    def poll(self):
        return -9 if self.killed else self.status if len(self.states) == 1 else None

    def kill(self):
        self.killed = True

    def results(self):
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]


def supervised(scripts, *scripts_of_workers, seconds=100.0):
    """Return the results of sections a, b and c, and what each worker was asked for."""
    clock, asked, flushed = Hand(), [], []
    waiting = [Played(clock, *each) for each in scripts_of_workers]

    def start(names, left_s):
        asked.append((names, left_s))
        return waiting.pop(0)

    def pause(seconds):
        clock.now_s += seconds

    results = scripts["gpu"].supervised(["a", "b", "c"], seconds, start, flushed.append, clock, pause)
    assert flushed[-1].keys() <= results.keys()
    return {name: each["state"] for name, each in results.items()}, asked


RAN = {"state": "ran", "seconds": 1.0, "rows": []}


def test_where_a_process_ends_within_a_section_another_goes_on_with_the_next(scripts):
    first = [{}, {"a": RAN}, {"a": RAN, "b": {"state": "running", "until_s": 50.0, "rows": []}}]
    states, asked = supervised(scripts, (first, 139), ([{}, {"c": RAN}], 0))
    assert states == {"a": "ran", "b": "failed: the process ended with 139", "c": "ran"}
    assert [names for names, _ in asked] == [["a", "b", "c"], ["c"]]
    assert asked[1][1] < 100.0


def test_a_section_that_stands_still_is_ended(scripts):
    stands = [{"a": {"state": "running", "until_s": 10.0, "rows": []}}] * 500
    states, _ = supervised(scripts, (stands, None), ([{"b": RAN, "c": RAN}], 0))
    assert states["a"].startswith("failed: stood still")
    assert states["b"] == states["c"] == "ran"


def test_a_broken_device_costs_no_section_but_its_own(scripts):
    failed = {"state": "failed: illegal address", "seconds": 1.0, "rows": []}
    states, _ = supervised(scripts, ([{}, {"a": failed}], 0), ([{"b": RAN, "c": RAN}], 0))
    assert states == {"a": "failed: illegal address", "b": "ran", "c": "ran"}


def test_a_process_that_cannot_even_begin_does_not_begin_for_ever(scripts):
    states, asked = supervised(scripts, *[([{}], 1)] * 3)
    assert set(states.values()) == {"failed: the process ended with 1"}
    assert len(asked) == 3


def test_all_sections_fit_into_the_whole(scripts):
    sections = scripts["gpu"].sections()
    assert sum(section.share for section in sections) == pytest.approx(1.0)
    assert len({section.name for section in sections}) == len(sections)
    assert {section.name for section in sections} == set(scripts["gpu_page"].TITLES)


def test_what_is_measured_of_the_kernels_alone_is_in_a_file_of_its_own(scripts, tmp_path):
    gpu = scripts["gpu"]
    ran = {section.name: {"state": "ran", "rows": [{"ms": 1}]} for section in gpu.sections()}
    gpu.save(tmp_path / "gpu.json", {"commit": "c", "measures": {"paths": ["engine"], "digest": "d"}, "sections": ran})
    engine, kernels = (json.loads((tmp_path / name).read_text("utf-8")) for name in ("gpu.json", "gpu-kernels.json"))
    alone = {section.name for section in gpu.sections() if section.run.__module__ == "gpu_kernels"}
    assert set(kernels["sections"]) == alone
    assert set(engine["sections"]) == set(ran) - alone
    assert engine["measures"]["paths"] == ["engine"]
    assert not any("engine" in path for path in kernels["measures"]["paths"])
    assert kernels["commit"] == "c"


def test_both_files_are_shown_together_and_kernels_of_another_commit_say_so(scripts, tmp_path, monkeypatch, capsys):
    about = {"device": "H", "driver": "580", "torch": "2", "command": "gpu.py", "measures": {}}
    sections = {name: {"state": "ran", "rows": []} for name in ("lstm", "table1", "tuner")}
    scripts["gpu"].save(tmp_path / "gpu.json", {**about, "commit": "before", "sections": sections})
    later = {**about, "commit": "after", "sections": {"lstm": sections["lstm"]}}
    scripts["gpu"].save(tmp_path / "gpu.json", later)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--show", "--json", str(tmp_path / "gpu.json")])
    scripts["gpu"].main()
    shown = capsys.readouterr().out
    assert "commit after: `gpu.py`" in shown
    assert shown.count("Commit before.") == 2
    assert shown.index("LSTM 1024") < shown.index("Commit before.")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_succeeds(scripts, tmp_path, monkeypatch, capsys):
    files = {name: tmp_path / f"out.{name}" for name in ("json", "png", "page")}
    files["page"].write_text("before\n<!-- results -->\nold\n<!-- /results -->\nafter\n", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["gpu.py", *(str(x) for name, path in files.items() for x in (f"--{name}", path))])
    scripts["gpu"].main()
    content = json.loads(files["json"].read_text(encoding="utf-8"))
    assert content["state"] == "not run: no GPU"
    assert {"commit", "machine", "torch", "command"} <= set(content)
    page = files["page"].read_text(encoding="utf-8")
    assert "old" not in page
    assert "Not run on a GPU yet" in page
    assert page.endswith("<!-- /results -->\nafter\n")
    assert files["png"].stat().st_size > 0


def test_what_is_over_time_or_fails_is_in_the_rows(scripts):
    kernels, clock = scripts["gpu_kernels"], Hand()
    until = scripts["gpu"].Deadline(2.0, clock)

    def run(x):
        clock.now_s += 1
        return {"x": x, "inverse": 1 / x}

    rows = each_of(kernels)([(1,), (0,), (2,)], run, ("x",), until)
    assert rows == [
        {"x": 1, "inverse": 1.0},
        {"x": 0, "not_run": "ZeroDivisionError: division by zero"},
        {"x": 2, "not_run": "out of time"},
    ]


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_the_reference_and_the_loop_compute_the_layer(scripts, cell, monkeypatch):
    torch.manual_seed(0)
    module = (nn.LSTM if cell == "lstm" else nn.GRU)(6, 6).requires_grad_(False)
    x = torch.randn(5, 3, 6)
    wanted, state = module(x)
    torch.testing.assert_close(scripts["gpu_kernels"].in_float64(cell, module, x).float(), wanted)
    last = scripts["gpu_kernels"].loop_call(cell, module, x)()
    torch.testing.assert_close(last, (state[0] if cell == "lstm" else state)[0])


def test_ratios_are_over_the_best_of_all(scripts):
    ratios = scripts["gpu_kernels"].ratios
    assert ratios([2.0, 4.0, 1.5, None, 3.0, 1.0]) == {"top1_over_best": 2.0, "top5_over_best": 1.5}
    assert ratios([None, 1.0]) == {"top1_over_best": None, "top5_over_best": 1.0}
    assert ratios([None] * 5 + [1.0]) == {"top1_over_best": None, "top5_over_best": None}


def test_targets_are_those_of_the_specification(scripts):
    target = scripts["gpu_kernels"].target_ms
    assert target(1024, 20, "float32") == 0.51
    assert target(1024, 64, "bfloat16") == 0.37
    assert target(256, 64, "float32") is None


def test_buckets_hold_each_request_once_and_like_lengths(scripts):
    lengths = np.random.default_rng(0).integers(1, 100, 300)
    batches = scripts["gpu_padded"].buckets(lengths, 10, 16)
    assert sorted(np.concatenate(batches).tolist()) == list(range(300))
    for batch in batches:
        assert len(batch) <= 16
        assert np.ptp(lengths[batch]) < 10


def test_results_become_tables_and_a_picture(scripts, tmp_path):
    page = scripts["gpu_page"]
    row = {"cell": "lstm", "dtype": "float32", "hidden": 64, "batch": 1, "kernel_ms": 0.061, "padded_ms": 0.2}
    late = {"cell": "lstm", "dtype": "float32", "hidden": 64, "batch": 10, "not_run": "out of time"}
    wrong = {
        "cell": "gru",
        "dtype": "float16",
        "hidden": 64,
        "batch": 1,
        "error": 0.5,
        "tolerance": 0.1,
        "passed": False,
    }
    content = {
        "device": "H", "driver": "580", "torch": "2", "commit": "c", "command": "python benchmarks/gpu.py",
        "sections": {
            "table1": {"state": "ran", "rows": [row, late]},
            "correctness": {"state": "ran", "rows": [wrong]},
            "tuner": {"state": "failed: RuntimeError: no", "rows": []},
        },
    }  # fmt: skip
    text = page.tables(content)
    assert "| lstm | float32 | 64 | 1 | 0.061 | 0.200 |" in text
    assert "| lstm | float32 | 64 | 10 | not run | not run |" in text
    assert "| 5.0e-01 | 1e-01 | NO |" in text
    assert "Failed: RuntimeError: no." in text
    path = tmp_path / "out.png"
    page.draw(path, content)
    assert path.stat().st_size > 0


def test_what_is_compiled_ahead_is_what_the_sections_ask_for(scripts, tmp_path, monkeypatch):
    compiling = scripts["gpu_compile"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jobs = compiling.jobs()
    asked = {(job[0].cell, job[0].dtype, job[0].hidden, job[0].batch) for job in jobs}
    assert ("gru", "bfloat16", 1024, 32) in asked  # table 1 with 20 rows
    assert ("lstm", "bfloat16", 128, 16) in asked  # char-RNN with 10 rows
    assert ("lstm", "float32", 1024, 1024) in asked  # the engine's largest tasks
    assert len(set(jobs)) == len(jobs)
    job = next(job for job in jobs if job[0].hidden == 64)
    assert compiling.compile_job(job, H200, "sm_90") >= 1
    assert compiling.compile_job(job, H200, "sm_90") == 0
    assert compiling.load_loops() == 0


def test_padded_and_packed_batches_give_the_same_and_so_do_trees_by_level(scripts):
    padded = scripts["gpu_padded"]
    workload = make_workload("lstm", lengths="clip:12", count=40, seed=0)
    found = []
    for pack in (False, True):
        torch.manual_seed(0)
        found.append(padded.lstm(workload, 8, "float32", "cpu", pack=pack)(np.arange(1, 20)))
    torch.testing.assert_close(*found)
    workload = make_workload("treelstm", count=20, seed=0)
    model = scripts["gpu_engine"].made("treelstm", workload, "float32", hidden=8, max_batch=8)
    leaf, inner = (model.cells[name].module for name in ("leaf", "inner"))
    with Engine(model) as engine:
        wanted = engine.map(list(workload.requests[:9]), progress=False)
    torch.testing.assert_close(padded.trees(workload, leaf, inner, "cpu")(np.arange(9)), torch.stack(wanted))


def test_translations_by_hand_have_the_words_of_the_longest(scripts):
    workload = make_workload("seq2seq", count=20, seed=0)
    model = scripts["gpu_engine"].made("seq2seq", workload, "float32", hidden=8, max_batch=8)
    run = scripts["gpu_padded"].seq2seq(workload, model.cells["decoder"].module, 8, "float32", "cpu")
    assert run(np.arange(5)).shape == (5, max(request["words"] for request in workload.requests[:5]))


@pytest.mark.gpu
def test_what_is_captured_by_hand_gives_what_the_cpu_gives(scripts):
    padded, engine = scripts["gpu_padded"], scripts["gpu_engine"]
    workload = make_workload("treelstm", count=90, seed=0)
    model = engine.made("treelstm", workload, "float32", hidden=64, max_batch=8)
    cells = [model.cells[name].module for name in ("leaf", "inner")]
    here, there = (padded.trees(workload, *cells, device) for device in ("cpu", "cuda"))
    for numbers in (np.arange(1), np.arange(90), np.arange(40, 80)):  # the last: after rows of other requests
        torch.testing.assert_close(there(numbers), here(numbers), atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
def test_words_by_hand_are_the_same_captured_and_launched_one_by_one(scripts, monkeypatch):
    padded, engine = scripts["gpu_padded"], scripts["gpu_engine"]
    workload = make_workload("seq2seq", count=90, seed=0)
    decoder = engine.made("seq2seq", workload, "float32", hidden=64, max_batch=8).cells["decoder"].module
    found = []
    for rows in (padded.ROWS, ()):
        monkeypatch.setattr(padded, "ROWS", rows)
        torch.manual_seed(0)
        run = padded.seq2seq(workload, decoder, 64, "float32", "cuda")
        found.append([run(np.arange(first, first + num)) for first, num in ((0, 1), (0, 64), (3, 32))])
    for captured, plain in zip(*found, strict=True):
        torch.testing.assert_close(captured, plain)


def test_all_requests_are_served_by_hand_and_what_is_not_counts_with_its_time_so_far(scripts, monkeypatch):
    padded, lengths, sizes = scripts["gpu_padded"], np.array([3, 4, 30, 31] * 5), []
    clock = VirtualClock()
    monkeypatch.setattr(padded, "time", SimpleNamespace(perf_counter=lambda: clock.advance(1e-4)))

    def run(numbers):
        clock.advance(1e-3)
        sizes.append(len(numbers))
        assert np.ptp(lengths[numbers]) < 10
        return torch.zeros(len(numbers))

    found = padded.live(run, lengths, 200.0, 0.2, 10, 3, seed=0)
    assert found["unanswered"] == 0
    assert max(sizes) <= 3
    assert 0 < found["p50_ms"] <= found["p90_ms"]
    late = padded.live(lambda numbers: clock.advance(0.5), lengths, 200.0, 0.2, 10, 1, seed=0)
    assert late["unanswered"] > 0
    best = padded.most_per_s(run, lengths, widths=(10,))
    assert best["rps"] == max(best["sweep"].values())


def test_tasks_are_timed_in_one_launch_and_step_by_step(scripts, monkeypatch):
    engine, seen = scripts["gpu_engine"], []

    def saturated(model, workload, count, policy):
        seen.append(Gpu.recurrent(None, None, 1, 1) if isinstance(Gpu.recurrent, mock.Mock) else "real")
        return {"peak_rps": 1.0}

    monkeypatch.setattr(engine, "saturated", saturated)
    monkeypatch.setattr(engine, "alone", lambda *_, **__: {})
    monkeypatch.setattr(engine, "made", lambda *_, **__: None)
    rows = engine.tasks(scripts["gpu"].Deadline(100.0, Hand()))
    assert [row["at_once"] for row in rows] == [True, False] * len(engine.POLICIES)
    assert seen == ["real", None] * len(engine.POLICIES)
    assert {row["not_run"] for row in engine.tasks(scripts["gpu"].Deadline(3.0, Hand()))} == {"out of time"}


@pytest.mark.slow
def test_late_requests_are_counted_where_all_are_finished(scripts, monkeypatch):
    engine = scripts["gpu_engine"]
    monkeypatch.setattr(engine, "DEVICE", "cpu")
    workload = make_workload("lstm", lengths="clip:12", count=40, seed=0)
    model = engine.made("lstm", workload, "float32", hidden=8, max_batch=8)
    for deadline_ms, late in ((1e6, 0.0), (1e-6, 1.0)):
        found = engine.loaded(model, workload, 100, 0.2, policy="auto", deadline_ms=deadline_ms, late="finish")
        assert found["failed"] == 0
        assert found["late_share"] == late


@pytest.mark.slow
def test_a_model_is_served_beside_by_hand_and_its_rows_can_be_written_down(scripts, monkeypatch):
    engine, padded = scripts["gpu_engine"], scripts["gpu_padded"]
    monkeypatch.setattr(engine, "DEVICE", "cpu")
    monkeypatch.setattr(engine, "WAITING", 100)
    monkeypatch.setitem(engine.RATES, "lstm", (30,))
    monkeypatch.setattr(padded, "MAXIMA", (64,))
    monkeypatch.setattr(padded, "LIVE", [(10, 64)])
    workload = make_workload("lstm", lengths="clip:12", count=40, seed=0)
    runs = {"padded": padded.lstm(workload, 8, "float32", "cpu", pack=False)}
    until = scripts["gpu"].Deadline(100.0, Hand())
    rows = engine.beside("lstm", workload, "float32", 8, 8, runs, workload.chains[:, 0], until)
    each = len(engine.POLICIES)
    assert [row["rate"] for row in rows] == [None] * each + [30] * each
    assert rows[-1]["failed"] == rows[-1]["unanswered"] == 0
    assert engine.alone(engine.made("lstm", workload, "float32", hidden=8, max_batch=8), workload, 3)["alone_ms"] > 0
    content = {"device": "x", "driver": "x", "torch": "x", "commit": "c", "command": "gpu.py"}
    content["sections"] = json.loads(json.dumps({"lstm": {"state": "ran", "rows": rows}}))
    assert "| cellular | float32 | 30 |" in scripts["gpu_page"].tables(content)
