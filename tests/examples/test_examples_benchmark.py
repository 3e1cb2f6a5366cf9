"""benchmarks/examples.py: layers by hand give torch's outputs, tables say what was measured, and a quick run works."""

from __future__ import annotations

import importlib
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def scripts():
    before, threads = set(sys.modules), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        patch.setenv("OMP_NUM_THREADS", "1")
        names = ("page", "hand_layers", "case", "compare")
        found = {name: importlib.import_module(f"real_models.{name}") for name in names}
        yield {**found, "examples": importlib.import_module("examples")}
    torch.set_num_threads(threads)
    for name in set(sys.modules) - before:
        if str(ROOT / "benchmarks") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


SEEN = {"compiled, 64": 99.0, "torch, 16": 80.0, "torch, 64": 70.0}


def result(*, ours=150.0, loads=()):
    figures = {
        "about": "words", "package": "g2p_en", "num_requests": 9, "agreement": {"package": 1.0, "by hand, torch": 0.5},
        "per_s": {"batchmaker": ours, "by hand": 100.0, "package": 50.0},
        "by_hand": {"best": "compiled, 64", "seen": SEEN},
        "target": 1.0, "ratio": ours / 100, "loads": list(loads),
    }  # fmt: skip
    facts = {"error": None, "not_run": None, "load_average": [0.5, 1.0], "commit": "abc", "quick": False}
    return {
        "command": "python benchmarks/examples.py --data DATA",
        "machine": {"cpu": "A processor", "cores": 2, "torch": "2.13"},
        "examples": [{"example": "pronounce", "figures": figures, **facts}],
    }


def load(**times):
    return {"per_s": 50.0, "latency_ms": times, "ratio": 3.0 if len(times) == 2 else None, "by_hand": {"best": "torch"}}


def test_the_table_says_who_is_ahead_and_whether_what_was_asked_for_was_met(scripts):
    page = scripts["page"]
    assert (
        "| 150 | 100 (compiled, 64) | 80 (torch, 16) | 50 (g2p_en) |  | 1.5 | 3 | 1.5, asked 1: met |"
        in page.rates_table(result())
    )
    assert "| 0.9 | 1.8 | 0.9, asked 1: **missed** |" in page.rates_table(result(ours=90.0))


def test_a_side_that_cannot_keep_up_has_no_latency(scripts):
    hand = {"p50": 1.0, "p90": 2.0}
    found = result(loads=[load(**{"by hand": hand}), load(**{"by hand": hand, "batchmaker": {"p50": 3.0, "p90": 4.0}})])
    first, second = scripts["page"].latency_table(found).splitlines()[2:]
    assert "| cannot keep up | 1 / 2 | cannot keep up |" in first
    assert "| 3 / 4 | 1 / 2 |" in second
    assert second.endswith("| 3: **missed** |")


def test_live_streams_have_a_table_where_an_example_has_them(scripts):
    assert scripts["page"].live_table(result()) == ""
    found = result()
    found["examples"][0]["figures"]["live"] = {
        "per_core": {"batchmaker": 300.0, "by hand": 200.0, "package": 150.0}, "streams": 50,
    }  # fmt: skip
    table = scripts["page"].live_table(found)
    assert "| `pronounce`, 50 streams | 300 | 200 | 150 | 1.5, asked 0.8: met | 2, asked 3: **missed** |" in table


def test_the_page_is_filled_between_its_markers_and_the_picture_is_drawn(scripts, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- examples -->\nold\n<!-- /examples -->\nafter\n", "utf-8")
    found = result()
    found["examples"].append({**found["examples"][0], "example": "speakers", "figures": None, "not_run": "needs it"})
    scripts["page"].show(found, page, tmp_path / "images" / "examples.png")
    text = page.read_text("utf-8")
    assert "old" not in text
    assert "](images/examples.png)" in text
    assert "- `pronounce`, 9 requests: 100 % as package, 50 % as by hand, torch" in text
    assert "- `speakers` has not been measured: needs it" in text
    scripts["page"].draw(tmp_path / "examples.png", found)
    assert (tmp_path / "examples.png").read_bytes().startswith(b"\x89PNG")


def test_the_project_has_the_place_that_the_tables_go_to():
    assert "<!-- examples -->" in (ROOT / "docs" / "which-models-gain.md").read_text("utf-8")


def test_every_example_has_a_file_a_readme_and_a_line_in_the_list_of_examples(scripts):
    listed = (ROOT / "examples" / "README.md").read_text("utf-8")
    for name in scripts["examples"].CASES:
        assert (ROOT / "examples" / name / f"{name}.py").is_file()
        assert f"{name}.py" in (ROOT / "examples" / name / "README.md").read_text("utf-8")
        assert f"({name}/README.md)" in listed


@pytest.mark.slow
@pytest.mark.parametrize("batch_first", [False, True])
def test_layers_by_hand_give_the_outputs_of_torchs(scripts, batch_first):
    layers = scripts["hand_layers"]
    generator = torch.Generator().manual_seed(0)
    lstm = nn.LSTM(6, 16, num_layers=2, batch_first=batch_first).requires_grad_(False)
    requests = [torch.randn(length, 6, generator=generator) for length in (3, 9, 1, 9, 4)]
    wanted = torch.cat([lstm(request)[0] for request in requests])
    ways = (
        layers.TorchLayers(lstm, packed=False), layers.TorchLayers(lstm, packed=True), layers.CompiledLayers(lstm),
    )  # fmt: skip
    for way in ways:
        assert (way(requests) - wanted).abs().max() < 1e-5


@pytest.mark.slow
def test_compiled_layers_go_in_both_directions(scripts):
    generator = torch.Generator().manual_seed(0)
    lstm = nn.LSTM(6, 16, bidirectional=True).requires_grad_(False)
    requests = [torch.randn(length, 6, generator=generator) for length in (3, 9, 1)]
    wanted = torch.cat([lstm(request)[0] for request in requests])
    assert (scripts["hand_layers"].CompiledLayers(lstm)(requests) - wanted).abs().max() < 1e-5
    with pytest.raises(ValueError, match="backward direction"):
        scripts["hand_layers"].TorchLayers(lstm, packed=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_examples_are_measured_quickly_and_shown(scripts, tmp_path, monkeypatch):
    for package in ("g2p_en", "nltk", "g2pM"):
        if find_spec(package) is None:
            pytest.skip(f"needs {package}")
    words, weibo = tmp_path / "europarl_deen" / "raw5k.en", tmp_path / "weibo_ner" / "weiboNER_2nd_conll.train"
    for path in (words, weibo):
        path.parent.mkdir()
    words.write_text("resumption of the session i declare resumed the session of the european parliament", "utf-8")
    weibo.write_text("\n\n".join(["长0\tO\n江1\tO\n很0\tO\n长0\tO", "好0\tO\n的0\tO"]) + "\n", "utf-8")
    (tmp_path / "page.md").write_text("<!-- examples -->\n<!-- /examples -->\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    chosen = ["--only", "pronounce", "chinese_pronunciation", "speakers"]
    files = ["--json", "found.json", "--png", "found.png", "--page", "page.md"]
    monkeypatch.setattr(sys, "argv", ["examples.py", "--data", ".", "--quick", *chosen, *files])
    scripts["examples"].main()
    found = json.loads((tmp_path / "found.json").read_text("utf-8"))["examples"]
    assert [one["example"] for one in found] == ["pronounce", "chinese_pronunciation", "speakers"]
    assert [one["error"] for one in found] == [None] * 3
    for one in found[:2]:
        assert all(rate > 0 for rate in one["figures"]["per_s"].values())
        assert set(one["figures"]["agreement"].values()) == {1.0}
    assert "needs" in found[2]["not_run"]
    assert "Of a quick run" in (tmp_path / "page.md").read_text("utf-8")
