"""benchmarks/gpu.py without a GPU: its sections' order and time, its arithmetic, tables and picture."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch):
    pytest.importorskip("cuda.core", reason="needs the extra `cuda`")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return {name: importlib.import_module(name) for name in ("gpu", "gpu_kernels", "gpu_engine", "gpu_page")}


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
    assert [len(json.loads(now)) for now in flushed] == [1, 2, 3]
    assert gpu.run_all(wanted, 0.0, flushed.append, clock)["c"]["state"] == "not run: out of time"


def test_all_sections_fit_into_the_whole(scripts):
    sections = scripts["gpu"].sections()
    assert sum(section.share for section in sections) == pytest.approx(1.0)
    assert len({section.name for section in sections}) == len(sections)
    assert {section.name for section in sections} == set(scripts["gpu_page"].TITLES)


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

    rows = kernels._each([(1,), (0,), (2,)], run, ("x",), until)
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
    batches = scripts["gpu_engine"].buckets(lengths, 10, 16)
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
