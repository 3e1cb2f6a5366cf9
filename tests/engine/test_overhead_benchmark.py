"""benchmarks/overhead.py: its programs by hand give torch's answers, its medians, tables and picture are right."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from batchmaker.lab import zoo
from insides import network_of

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    "measuring", "hand_kernels", "hand_chains", "hand_server", "hand_streams", "hand_decoders", "hand_tagger",
    "hand_trees", "page", "picture", "childsum", "beam", "decisions", "translation",
)  # fmt: skip


@pytest.fixture(scope="module")
def scripts():
    before, threads = set(sys.modules), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        patch.setenv("OMP_NUM_THREADS", "1")
        found = {name: importlib.import_module(f"engine_cost.{name}") for name in NAMES}
        yield {**found, "overhead": importlib.import_module("overhead")}
    torch.set_num_threads(threads)
    for name in set(sys.modules) - before:
        if str(ROOT / "benchmarks") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def row(work="LSTM 64 float32", figure="all waiting", *, ratio=0.5, baseline="by hand", better="higher", **facts):
    whole = {
        "work": work, "figure": figure, "unit": "requests/s", "ours": 100 * ratio, "theirs": 100.0, "ratio": ratio,
        "better": better, "target": 0.6, "baseline": baseline, "more": {}, "met": ratio >= 0.6,
    }  # fmt: skip
    return {**whole, **facts}


def result(*rows, **facts):
    line = {"line": "by-hand", "rows": list(rows), "error": None, "not_run": None, "commit": "abc", "quick": False}
    return {
        "command": "python benchmarks/overhead.py --data DATA", "load_average": [0.1, 1.0],
        "machine": {"cpu": "A processor", "cores": 2, "torch": "2.13"}, "lines": [{**line, **facts}],
    }  # fmt: skip


# --- what is said of measurements --------------------------------------------------------------------------------


def test_a_ratio_is_the_median_of_ratios_and_not_the_ratio_of_medians(scripts):
    compared = scripts["measuring"].compared
    ours, theirs = np.array([1.0, 8.0, 3.0]), np.array([2.0, 2.0, 3.0])
    found = compared("work", "figure", "ms", ours, theirs, better="lower", baseline="by hand", target=0.9)
    assert (found.ours, found.theirs, found.ratio, found.is_met) == (3.0, 2.0, 1.0, False)


def test_a_side_that_did_nothing_is_an_error_and_no_ratio(scripts):
    with pytest.raises(ValueError, match="a side did nothing"):
        scripts["measuring"].compared(
            "work", "figure", "requests/s", np.array([1.0]), np.array([0.0]), better="higher", baseline="by hand"
        )


@pytest.mark.parametrize(("better", "met"), [("higher", True), ("lower", False)])
def test_which_side_of_the_target_is_the_good_one_depends_on_the_figure(scripts, better, met):
    found = scripts["measuring"].absolute("work", "figure", "us", 2.0, target=1.0, better=better)
    assert found.is_met is met
    assert found.to_json()["met"] is met


@pytest.mark.slow
def test_both_sides_take_turns_and_every_second_time_the_other_is_first(scripts):
    called = []
    sides = {name: lambda name=name: called.append(name) or len(called) for name in ("ours", "theirs")}
    found = scripts["measuring"].interleaved(sides, 2)
    assert called == ["ours", "theirs", "theirs", "ours"]
    assert found["ours"].tolist() == [1.0, 4.0]


@pytest.mark.slow
def test_the_best_side_is_known_by_its_best_look(scripts):
    looks = {"slow": iter([3.0, 3.0]), "noisy": iter([1.0, 9.0])}
    sides = {name: lambda name=name: next(looks[name]) for name in looks}
    assert scripts["measuring"].best_of(sides) == ("noisy", {"slow": 3.0, "noisy": 9.0})


def test_a_line_that_fails_or_cannot_run_is_written_down_and_the_others_go_on(scripts, monkeypatch, tmp_path):
    overhead, measuring = scripts["overhead"], scripts["measuring"]

    def fails(settings):
        yield measuring.absolute("work", "figure", "us", 2.0, target=1.0)
        raise ValueError("broken")

    def absent(settings):
        raise measuring.NotRunError("needs a peer")
        yield

    def works(settings):
        yield measuring.absolute("other", "figure", "us", 0.5, target=1.0)

    monkeypatch.setattr(overhead, "LINES", {"fails": fails, "absent": absent, "works": works})
    options = overhead.parser().parse_args(["--data", str(tmp_path), "--json", str(tmp_path / "found.json")])
    overhead.run(options)
    lines = json.loads((tmp_path / "found.json").read_text("utf-8"))["lines"]
    assert [(line["error"], line["not_run"]) for line in lines] == [
        ("ValueError: broken", None), (None, "needs a peer"), (None, None),
    ]  # fmt: skip
    assert [len(line["rows"]) for line in lines] == [1, 0, 1]


def test_lines_that_are_measured_again_replace_their_old_figures_only(scripts):
    overhead = scripts["overhead"]
    found = {"lines": [{"line": "sorted", "n": 1}, {"line": "alone", "n": 2}], "command": "c"}
    found = overhead.kept(found, {"line": "sorted", "n": 3})
    assert [(line["line"], line["n"]) for line in found["lines"]] == [("alone", 2), ("sorted", 3)]


def test_the_command_that_is_kept_has_no_folder_of_this_machine(scripts):
    overhead = scripts["overhead"]
    options = overhead.parser().parse_args(
        ["--data", "/some/where", "--dynet-python", "/x/python", "--quick", "--only", "alone"]
    )
    assert " ".join(overhead.command_line(options)) == "--data DATA --only alone --quick --dynet-python PYTHON"


# --- tables and picture ------------------------------------------------------------------------------------------


def test_each_figure_is_quoted_beside_the_baseline_that_does_best_against_the_engine(scripts):
    rows = [
        row(ratio=0.7, baseline="weak"), row(ratio=0.5, baseline="strong"),
        row(figure="p90", ratio=0.5, baseline="weak", better="lower"),
        row(figure="p90", ratio=0.9, baseline="strong", better="lower"),
        row(figure="cost", theirs=None),
    ]  # fmt: skip
    found = scripts["page"].strongest(rows)
    assert [(each["figure"], each["baseline"]) for each in found] == [("all waiting", "strong"), ("p90", "strong")]


def test_the_readmes_table_has_its_rows_beside_their_strongest_baselines(scripts):
    chosen = [row(work, figure) for work, figure in scripts["page"].README_ROWS]
    found = result(*chosen, row("LSTM 512 float32", ratio=0.4, baseline="buckets"), row("LSTM 128 float32"))
    lines = scripts["page"].readme_table(found).splitlines()[2:]
    assert len(lines) == len(chosen)
    assert "| LSTM 512 float32 | all waiting | buckets | 100 requests/s | 40 requests/s | 0.4 |" in lines


def test_readme_and_page_have_the_tables_of_the_results(scripts):
    page, found = scripts["page"], json.loads((ROOT / "benchmarks" / "results" / "overhead.json").read_text("utf-8"))
    shown = (ROOT / "README.md").read_text("utf-8")
    assert f"<!-- results -->\n{page.readme_table(found)}\n\n{page.machine_line(found)}\n" in shown
    assert page.readme_table(found).count("\n") == 1 + len(page.README_ROWS)
    assert page.whole_table(found) in (ROOT / "papers" / "docs" / "benchmarks-in-full.md").read_text("utf-8")


def test_the_whole_table_says_what_was_met_and_missed(scripts):
    lines = scripts["page"].whole_table(result(row(), row(ratio=0.6), row(theirs=None, unit="µs"))).splitlines()[2:]
    assert lines[0].endswith("| 0.5 | at least 0.6 | **missed** |")
    assert lines[1].endswith("| 0.6 | at least 0.6 | met |")
    assert lines[2] == "| LSTM 64 float32 | all waiting | by hand |  | 50 µs |  | at least 0.6 | **missed** |"


def test_what_was_not_measured_says_why(scripts):
    assert scripts["page"].left_out(result(not_run="needs a peer")) == "- `by-hand` has not been measured: needs a peer"
    assert scripts["page"].left_out(result(row())) == ""


def test_page_and_readme_are_filled_between_their_markers_and_the_picture_is_drawn(scripts, tmp_path):
    page, readme = tmp_path / "page.md", tmp_path / "README.md"
    for path, name in ((page, "overhead"), (readme, "results")):
        path.write_text(f"before\n<!-- {name} -->\nold\n<!-- /{name} -->\nafter\n", "utf-8")
    found = result(row(), row(better="lower"), row(theirs=None, better="lower"), not_run="needs a peer")
    scripts["page"].show(found, page, readme, tmp_path / "images" / "ratios.png")
    for path in (page, readme):
        text = path.read_text("utf-8")
        assert text.startswith("before\n<!--")
        assert text.endswith("-->\nafter\n")
        assert "old" not in text
        assert "A processor, 2 cores, one compute thread, load average 0.1 to 1, torch 2.13, commit abc" in text
    assert "](images/ratios.png)" in page.read_text("utf-8")
    scripts["picture"].draw(tmp_path / "ratios.png", found)
    assert (tmp_path / "ratios.png").read_bytes().startswith(b"\x89PNG")


def test_costs_are_drawn_over_what_was_asked_for(scripts):
    place = scripts["picture"].place
    assert place(row(theirs=None, ratio=2.0, target=0.5, better="lower")) == (4.0, 1.0)
    assert place(row(theirs=None, ratio=250.0, target=500.0, better="higher")) == (2.0, 1.0)
    assert place(row(ratio=0.3)) == (0.3, 0.6)


# --- programs by hand --------------------------------------------------------------------------------------------


def sentences(lengths, words=50):
    generator = np.random.default_rng(0)
    return [generator.integers(0, words, length) for length in lengths]


def lstm(scripts, dtype="float32"):
    step = zoo.make("lstm", vocabulary_size=50, hidden=24, dtype=dtype).cells["step"].module
    chains = scripts["hand_chains"]
    return chains.Lstm.of(step.embedding, step.layers[0]), chains.Plain(step.embedding, step.layers[0])


LENGTHS = (3, 9, 1, 9, 4, 30, 2)


@pytest.mark.slow
def test_continuous_batching_by_hand_gives_the_states_of_torchs_lstm(scripts):
    folded, plain = lstm(scripts)
    requests = sentences(LENGTHS * 60)  # more than there are lanes
    with contextlib.closing(scripts["hand_chains"].Continuous(folded)) as hand:
        futures = [hand.submit(request) for request in requests]
        found = np.stack([future.result(timeout=60) for future in futures])
    assert np.abs(found - np.stack([plain.alone(request).numpy() for request in requests])).max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.03)])
def test_closed_batches_by_hand_give_the_states_of_torchs_lstm(scripts, dtype, tolerance):
    folded, plain = lstm(scripts, dtype)
    requests = sentences(LENGTHS)
    for found in (scripts["hand_chains"].Closed(folded)(requests), plain.padded(requests), plain.packed(requests)):
        alone = [plain.alone(request) for request in requests]
        differences = [float((a.float() - b.float()).abs().max()) for a, b in zip(found, alone, strict=True)]
        assert max(differences) < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.03)])
def test_the_lstm_in_onnx_runtime_has_the_state_of_torchs(scripts, dtype, tolerance):
    pytest.importorskip("onnxruntime")
    step = zoo.make("lstm", vocabulary_size=50, hidden=24, dtype=dtype).cells["step"].module
    _, plain = lstm(scripts, dtype)
    other = importlib.import_module("engine_cost.hand_onnx").OnnxLstm(step.embedding, step.layers[0])
    for request in sentences(LENGTHS):
        assert np.abs(other.alone(request) - plain.alone(request).float().numpy()).max() < tolerance


def test_bfloat16_is_rounded_as_torch_does(scripts):
    kernels = scripts["hand_kernels"]
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    bits = [int(kernels.narrowed.py_func(np.float32(value))) for value in values.tolist()]
    assert bits == values.to(torch.bfloat16).view(torch.uint16).tolist()


def test_a_server_of_closed_batches_takes_no_more_than_its_maximum_from_one_bucket(scripts):
    seen = []

    def run(requests):
        seen.append([len(request) for request in requests])
        return [sum(request) for request in requests]

    requests = [[1] * length for length in (2, 7, 1, 8, 2, 3)]
    with contextlib.closing(scripts["hand_server"].Batches(run, maximum=2, width=5)) as server:
        futures = [server.submit(request) for request in requests]
        assert [future.result(timeout=60) for future in futures] == [2, 7, 1, 8, 2, 3]
    assert all(len(batch) <= 2 and len({length > 5 for length in batch}) == 1 for batch in seen)


def test_a_batch_that_fails_fails_its_requests_and_the_next_one_runs(scripts):
    def run(requests):
        return [1 / len(request) for request in requests]

    with contextlib.closing(scripts["hand_server"].Batches(run, maximum=1)) as server:
        failed = server.submit([])
        assert isinstance(failed.exception(timeout=60), ZeroDivisionError)
        assert server.submit([1, 1]).result(timeout=60) == 0.5


def test_requests_are_put_into_batches_by_their_length(scripts):
    requests = [[0] * length for length in (3, 12, 5, 1, 11, 6)]
    found = scripts["hand_server"].in_batches(requests, 2, 5)
    assert [[len(request) for request in batch] for batch in found] == [[3, 5], [1], [12, 11], [6]]
    assert len(scripts["hand_server"].in_batches(requests, 6, None)) == 1


@pytest.mark.slow
def test_the_taggers_by_hand_give_the_engines_labels(scripts):
    tagger = scripts["hand_tagger"]
    model = zoo.make("bilstm-tagger", vocabulary_size=50, hidden=24, layers=1)
    requests = sentences(LENGTHS)
    wanted = model.batched(requests)
    for way in tagger.taggers(model).values():
        assert [labels.tolist() for labels in way(requests)] == [labels.tolist() for labels in wanted]


@pytest.mark.slow
def test_the_decoders_by_hand_say_the_same_and_stop_at_the_end(scripts):
    decoders = scripts["hand_decoders"]
    words = sentences((4, 7, 7, 9, 5, 10, 6) * 4, decoders.LETTERS)
    model = decoders.Spoken(words)
    reader, writer = model.read.module, model.write.module
    plain, folded = (way(reader, writer)(words) for way in (decoders.PlainBatch, decoders.FoldedBatch))
    assert [said.tolist() for said in folded] == [said.tolist() for said in plain]
    assert all(decoders.END not in said[:-1] and len(said) <= decoders.MOST_SOUNDS for said in plain)
    assert 4 <= np.mean([len(said) for said in plain]) <= 10


@pytest.mark.slow
def test_trees_level_by_level_by_hand_have_the_states_of_node_by_node(scripts):
    model = zoo.make("treelstm", vocabulary_size=50, hidden=24)
    shapes = ([[0, 1], [4, 2], [3, 5]], [], [[0, 1]], [[1, 2], [0, 3]])
    words = sentences([len(children) + 1 for children in shapes])
    requests = [
        {"words": leaves, "children": np.array(children, np.int64).reshape(-1, 2)}
        for leaves, children in zip(words, shapes, strict=True)
    ]
    wanted = torch.stack(model.batched(requests)).numpy()
    run = scripts["hand_trees"].TreesByHand(model)
    assert np.abs(run(requests) - wanted).max() < 1e-5
    assert np.abs(run(requests[:1]) - wanted[:1]).max() < 1e-5


def test_dependency_trees_by_hand_have_the_states_of_the_model(scripts):
    model = zoo.make("treelstm-childsum", vocabulary_size=50)
    edges = ([[1, 0], [1, 2], [2, 3], [2, 4]], [], [[0, 1]], [[0, k] for k in range(1, 8)])
    words = sentences([len(pairs) + 1 for pairs in edges])
    requests = [
        {"words": given, "edges": np.array(pairs, np.int64).reshape(-1, 2)}
        for given, pairs in zip(words, edges, strict=True)
    ]
    wanted, hand = torch.stack(model.batched(requests)), scripts["childsum"].ChildSumByHand(model)
    with torch.no_grad():
        torch.testing.assert_close(torch.stack(hand.by_hand(requests)), wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(torch.stack(list(map(hand.alone, requests))), wanted, atol=1e-5, rtol=1e-5)


def test_beams_by_hand_find_the_words_of_the_model(scripts, monkeypatch):
    monkeypatch.setattr(scripts["beam"], "WORDS", 50)
    model = zoo.make("seq2seq-attention", vocabulary_size=50, hidden=8, beam=3)
    model.step.module.project.weight *= 20  # so that no scores are equal but for rounding
    words = sentences([3, 5, 5, 1, 7, 2])
    requests = [{"source": given, "words": count} for given, count in zip(words, (4, 9, 1, 2, 9, 3), strict=True)]
    wanted, hand = [text.tolist() for text in model.batched(requests)], scripts["beam"].BeamByHand(model)
    with torch.no_grad():
        assert [text.tolist() for text in hand.by_hand(requests)] == wanted
        assert [hand.alone(request).tolist() for request in requests] == wanted


def test_diffusion_by_hand_makes_the_vectors_of_the_model(scripts):
    model = zoo.make("diffusion", width=8, times=60)
    noise = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    requests = [{"noise": one, "steps": steps} for one, steps in zip(noise, (3, 1, 9, 9, 60, 2), strict=True)]
    wanted, hand = torch.stack(model.batched(requests)), scripts["decisions"].DiffusionByHand(model)
    with torch.no_grad():
        torch.testing.assert_close(torch.stack(hand.by_hand(requests)), wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(torch.stack(list(map(hand.alone, requests))), wanted, atol=1e-5, rtol=1e-5)


def test_ctranslate2_writes_the_words_of_the_model_that_it_is_made_of(scripts, monkeypatch, tmp_path):
    peer = pytest.importorskip("ctranslate2")
    monkeypatch.setattr(scripts["translation"], "WORDS", 50)
    model = zoo.make("transformer", vocabulary_size=50, hidden=16, heads=2, inner=32, layers=2, positions=12)
    scripts["translation"].decouple(network_of(model))
    words = sentences([3, 5, 5, 1, 7, 2])
    requests = [{"source": given, "words": count} for given, count in zip(words, (4, 9, 1, 4, 9, 4), strict=True)]
    wanted = [text.tolist() for text in model.batched(requests)]
    theirs = scripts["translation"].Translator(peer, network_of(model), tmp_path, requests)
    assert theirs.words(2) == wanted
    assert len({word for text in wanted for word in text}) > 5


def test_live_streams_by_hand_keep_their_states_apart_and_in_order(scripts):
    streams = scripts["hand_streams"]
    module = streams.Streams().frame.module
    frames = torch.randn(4, 1, streams.FRAME, generator=torch.Generator().manual_seed(0))
    with contextlib.closing(streams.StreamsByHand(module, 2)) as hand:
        both = [
            [hand.submit(stream, frames[number]) for number in order] for stream, order in ((0, (0, 1)), (1, (2, 3)))
        ]
        found = [[future.result(timeout=60) for future in futures] for futures in both]
    for said, order in zip(found, ((0, 1), (2, 3)), strict=True):
        h = c = torch.zeros(1, streams.HIDDEN)
        for value, number in zip(said, order, strict=True):
            speech, h, c = module(frames[number], h, c)
            assert value == pytest.approx(float(speech), abs=1e-5)


@pytest.mark.slow
def test_two_lines_are_measured_quickly_and_shown(scripts, tmp_path, monkeypatch):
    text = tmp_path / "europarl_deen" / "raw5k.en"
    text.parent.mkdir()
    text.write_text("\n".join(" ".join(["word"] * (1 + number % 30)) for number in range(200)), "utf-8")
    for path, name in (("page.md", "overhead"), ("README.md", "results")):
        (tmp_path / path).write_text(f"<!-- {name} -->\n<!-- /{name} -->\n", "utf-8")
    files = ["--json", "found.json", "--png", "found.png", "--page", "page.md", "--readme", "README.md"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["overhead.py", "--data", ".", "--quick", "--only", "alone", "scheduler", *files])
    scripts["overhead"].main()
    lines = json.loads((tmp_path / "found.json").read_text("utf-8"))["lines"]
    assert [(line["line"], line["error"], len(line["rows"])) for line in lines] == [
        ("alone", None, 1), ("scheduler", None, 3),
    ]  # fmt: skip
    assert all(row["ours"] > 0 for line in lines for row in line["rows"])
    assert "Of a quick run" in (tmp_path / "page.md").read_text("utf-8")
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
