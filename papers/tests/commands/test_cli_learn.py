"""`batchmaker learn`: a policy from a file of requests, and the policy in use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result
from waiting_models import Waiting

import batchmaker as bm
from batchmaker.errors import DataError, ModelError, OptionError, PolicyFileError
from batchmaker.lab import zoo
from batchmaker.lab.datasets import random_trees, read_trees, to_sexpr
from batchmaker.policies.learned import PolicyFile

Command = Callable[..., Result]
POLICIES = [
    "depth", "agenda", "agenda-remaining", "heuristic-forward", "heuristic-backward", "e_base", "e_max", "e_sort",
]  # fmt: skip
QUICK = ("--episodes", 25, "--learners", 1)


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trees") / "trees.txt"
    drawn = random_trees(40, seed=5, min_leaves=3, max_leaves=12)
    path.write_text("".join(f"{to_sexpr(tree)}\n" for tree in drawn), "utf-8")
    return path


@pytest.fixture(scope="module")
def policy(trees: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from typer.testing import CliRunner

    from batchmaker.cli.main import app

    path = tmp_path_factory.mktemp("policies") / "policy.json"
    learn = ["learn", "treelstm", "--data", trees, "--batch", 2, "--out", path, "--json", path.with_name("report.json")]
    done = CliRunner().invoke(app, [str(part) for part in (*learn, *QUICK)], catch_exceptions=False)
    assert done.exit_code == 0
    path.with_name("stdout.txt").write_text(done.output, "utf-8")
    return path


def test_the_report_has_every_policy_with_its_batches_and_the_bound(policy, read_json):
    report = read_json(policy.with_name("report.json"))
    assert [row["policy"] for row in report] == POLICIES
    assert {frozenset(row) for row in report} == {
        frozenset({"policy", "batch", "mean_batches", "lower_bound", "decision_us"})
    }
    assert {row["batch"] for row in report} == {2}
    rows = {row["policy"]: row for row in report}
    assert all(row["mean_batches"] >= row["lower_bound"] for row in report)
    for learnt in ("e_base", "e_max", "e_sort"):  # trees: the bound itself
        assert rows[learnt]["mean_batches"] == rows[learnt]["lower_bound"]
    assert rows["agenda-remaining"]["mean_batches"] > rows["e_sort"]["mean_batches"]


def test_what_is_counted_follows_from_the_file_alone(policy, trees, read_json):
    """Two trees together need the leaves, as many levels as the deeper one has, and all outputs at once."""
    from batchmaker.lab.datasets import read_trees, tree_depth

    depths = [tree_depth(tree) for tree in read_trees(trees)[:10]]
    expected = sum(max(depths[i : i + 2]) + 1 for i in range(0, 10, 2)) / 5
    assert read_json(policy.with_name("report.json"))[0]["lower_bound"] == expected


def test_a_table_is_printed_and_a_curve_drawn_beside_the_policy(policy):
    shown = policy.with_name("stdout.txt").read_text("utf-8")
    assert all(name in shown for name in POLICIES)
    assert "learnt from: trees.txt, requests 11 to 40" in shown
    assert policy.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_the_file_says_what_it_was_learnt_for_and_from(policy):
    file = PolicyFile.read(policy)
    assert (file.model, file.encoding, file.learnt.batch, file.learnt.requests) == ("treelstm", "sort", 2, 30)
    assert [cell.name for cell in file.cells] == ["leaf", "inner", "classify"]


def test_the_policy_drives_the_simulator_and_not_for_another_model(command: Command, policy, read_json, tmp_path):
    small = ("--npu", "--rate", 500, "--requests", 30, "--hidden", 8, "--json", tmp_path / "out.json")
    done = command("simulate", "treelstm", "--policy", f"learned:file={policy}", *small)
    assert done.exit_code == 0, done.output
    assert read_json(tmp_path / "out.json")[0]["policy"].startswith("learned")
    refused = command("simulate", "lstm", "--policy", f"learned:file={policy}", *small)
    assert isinstance(refused.exception, PolicyFileError)
    assert "learnt for model 'treelstm'" in str(refused.exception)


def test_another_file_to_learn_from_leaves_the_first_to_be_counted(command: Command, trees, tmp_path):
    few = tmp_path / "few.txt"
    few.write_text("\n".join(trees.read_text("utf-8").splitlines()[:10]) + "\n", "utf-8")
    out = tmp_path / "policy.json"
    ask = ("learn", "treelstm", "--data", few, "--batch", 2, "--out", out, *QUICK)
    refused = command(*ask)
    assert isinstance(refused.exception, DataError)
    assert "got 10 requests, expected at least 12" in str(refused.exception)
    assert "--train-data" in str(refused.exception)
    done = command(*ask, "--train-data", trees, "--encoding", "max")
    assert done.exit_code == 0, done.output
    assert (PolicyFile.read(out).learnt.data, PolicyFile.read(out).encoding) == ("trees.txt, requests 1 to 40", "max")


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (("lstn", "--batch", 2), OptionError, "no directory of a saved one) 'lstn'"),
        (("resnet50", "--batch", 2), OptionError, "or for the directory of a saved model with its requests as JSON"),
        (("lstm", "--batch", 2, "--words", "words.txt"), OptionError, "list of words makes lattices"),
        (("treelstm", "--batch", 2, "--encoding", "sorted"), OptionError, "Did you mean 'sort'"),
        (("treelstm", "--batch", 20), DataError, "smaller --batch"),
        (("treelstm", "--batch", 2, "--json", "/nowhere/report.json"), DataError, "there is no folder"),
    ],
)
def test_what_cannot_be_learnt_is_refused(command: Command, trees, tmp_path, arguments, error, says):
    done = command("learn", *arguments, "--data", trees, "--out", tmp_path / "policy.json", *QUICK)
    assert isinstance(done.exception, error)
    assert says in str(done.exception)
    assert not (tmp_path / "policy.json").exists()


@pytest.fixture(scope="module")
def parser(trees: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The directory of a saved model, and its requests as JSON lines."""
    folder = tmp_path_factory.mktemp("saved")
    bm.save(zoo.make("treelstm", vocabulary_size=20, hidden=4, max_batch=4), folder / "parser")
    requests = [{"words": [3] * tree.num_leaves, "children": tree.children.tolist()} for tree in read_trees(trees)]
    lines = folder / "requests.jsonl"
    lines.write_text("".join(f"{json.dumps(request)}\n\n" for request in requests), "utf-8")
    return folder / "parser", lines


@pytest.mark.slow
def test_a_saved_model_is_learnt_for_and_then_run(command: Command, parser, tmp_path):
    directory, lines = parser
    out = tmp_path / "policy.json"
    done = command("learn", directory, "--data", lines, "--batch", 2, "--out", out, *QUICK)
    assert done.exit_code == 0, done.output
    file = PolicyFile.read(out)
    assert (file.model, file.learnt.data) == ("parser", "requests.jsonl, requests 11 to 40")
    assert [cell.name for cell in file.cells] == ["leaf", "inner"]
    answered = tmp_path / "out.jsonl"
    ran = command("run", directory, "--input", lines, "--output", answered, "--policy", f"learned:file={out}")
    assert ran.exit_code == 0, ran.output
    assert "warning" not in ran.output
    assert len(answered.read_text("utf-8").splitlines()) == 40


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"words": [3]', "requests.jsonl, line 81: not JSON"),
        ('{"words": [3, 3], "children": [[0, 7]]}', "requests.jsonl, line 81: "),
    ],
)
def test_a_request_that_the_saved_model_refuses_is_named(command: Command, parser, tmp_path, line, says):
    directory, lines = parser
    worse = tmp_path / "requests.jsonl"
    worse.write_text(lines.read_text("utf-8") + line, "utf-8")
    done = command("learn", directory, "--data", worse, "--batch", 2, "--out", tmp_path / "policy.json", *QUICK)
    assert isinstance(done.exception, DataError)
    assert says in str(done.exception)


def test_graphs_that_depend_on_values_are_refused(command: Command, tmp_path):
    bm.save(zoo.make("seq2seq", vocabulary_size=20, hidden=4, max_batch=4), tmp_path / "until")
    bm.save(Waiting(), tmp_path / "yields", example_request=[1.0])
    for name, request, says in (("until", [3, 4], "ends a loop by a value"), ("yields", [1.0], "waits for values")):
        lines = tmp_path / f"{name}.jsonl"
        lines.write_text(f"{json.dumps(request)}\n" * 12, "utf-8")
        ask = ("learn", tmp_path / name, "--data", lines, "--batch", 2, "--out", tmp_path / "policy.json", *QUICK)
        refused = command(*ask)
        assert isinstance(refused.exception, ModelError), name
        assert says in str(refused.exception)
        assert "follow from the request alone" in str(refused.exception)
    lines = tmp_path / "known.jsonl"  # how many words is part of the request
    lines.write_text(f"{json.dumps({'source': [3, 4], 'words': 3})}\n" * 12, "utf-8")
    done = command("learn", tmp_path / "until", "--data", lines, "--batch", 2, "--out", tmp_path / "p.json", *QUICK)
    assert done.exit_code == 0, done.output


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lstm", "gru", "bert", "seq2seq", "gnmt", "transformer"])
def test_networks_of_text_are_learnt_for_from_its_lines(command: Command, read_json, tmp_path, name):
    source = tmp_path / "pairs.en"
    source.write_text("a b c\nd\ne f\n\n" * 5, "utf-8")
    source.with_suffix(".de").write_text("x y\nz\nw w w\n\n" * 5, "utf-8")
    out, report = tmp_path / "policy.json", tmp_path / "report.json"
    done = command("learn", name, "--data", source, "--batch", 2, "--out", out, "--json", report, *QUICK)
    assert done.exit_code == 0, done.output
    assert PolicyFile.read(out).learnt.data == "pairs.en, requests 11 to 15"
    if name == "lstm":
        assert read_json(report)[0]["lower_bound"] == (3 + 3 + 2 + 3 + 3) / 5  # the longer line of each pair


@pytest.mark.parametrize("verb", ["run", "simulate", "serve", "serve saved"])
def test_a_policy_for_another_model_with_these_cells_is_warned_of(
    command: Command, policy, trees, parser, tmp_path, monkeypatch, verb
):
    monkeypatch.setattr("batchmaker.server.serve", lambda settings, ready, read: True)
    name = "parser" if verb == "serve saved" else "treelstm"
    ask = {
        "run": ("run", name, "--input", trees, "--output", tmp_path / "out.jsonl", "--hidden", 8, "--max-batch", 4),
        "simulate": ("simulate", name, "--npu", "--rate", 500, "--requests", 5, "--hidden", 8),
        "serve": ("serve", f"alias={name}"),
        "serve saved": ("serve", parser[0]),
    }[verb]
    for learnt_for, warned in (("treelstm-2type", True), (name, False)):
        file = tmp_path / f"{learnt_for}.json"
        content = policy.read_text("utf-8").replace('"model": "treelstm"', f'"model": "{learnt_for}"')
        file.write_text(content, "utf-8")
        done = command(*ask, "--policy", f"learned:file={file}")
        assert done.exit_code == 0, done.output
        assert (f"learnt for model 'treelstm-2type', and {name!r} runs" in done.output) is warned


def test_an_empty_file_is_refused(command: Command, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.touch()
    done = command("learn", "treelstm", "--data", empty, "--out", tmp_path / "policy.json")
    assert isinstance(done.exception, DataError)


def test_help_says_what_it_does_and_how_it_is_used(command: Command):
    shown = command("learn", "--help").output
    assert "lower bound" in shown
    assert "learned:file=policy.json" in shown
