"""Requests of ED-Batch's workloads in the order of their files, and the commands on them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from batchmaker.cli.requests import LATTICES, TAGGERS, TREES, WORKLOADS, num_cells, requests_from
from batchmaker.cli.simulate import workload as simulated
from batchmaker.cli.workload import make_workload
from batchmaker.errors import DataError, OptionError
from batchmaker.lab import zoo
from batchmaker.lab.zoo.blueprint import blueprint
from batchmaker.lab.zoo.shapes import ShapeRegistry
from batchmaker.model.unfolding import Unfolding

TREE_LINES = "(3 (2 a) (1 b))\n\n(1 word)\n(4 (2 (1 a) (2 c)) (1 b))\n"
TAGGED_LINES = "the|O cat|I-ORG sat|O\nthe|O|O\n"
LATTICE_LINES = "2\n3\n0 7 9\n0\n1 0 62\n2 1 48 0 33\n2\n0 1\n0\n1 0 5\n"
SMALL = {"hidden": 4, "max_batch": 4}


@pytest.fixture
def file_for(tmp_path):
    """The file of a workload."""

    def write(name):
        content = TREE_LINES if name in TREES else TAGGED_LINES if name in TAGGERS else LATTICE_LINES
        if name == "lstm-nmt":
            (tmp_path / "pairs.vi").write_text("x y\nz\n\nw\n")
            content = "a b c\nd\ne\n\n"
        path = tmp_path / ("pairs.en" if name == "lstm-nmt" else "data.txt")
        path.write_text(content)
        return path

    return write


def taken(model, request):
    """The number of cells that a request calls."""
    unfolding = Unfolding(model, ShapeRegistry(), request)
    unfolding.start()
    return unfolding.graph.num_nodes


@pytest.mark.parametrize("name", WORKLOADS)
def test_requests_come_in_the_order_of_the_file_and_fit_their_model(file_for, name):
    found = requests_from(name, file_for(name), **SMALL)
    expected = [3, 1, 5] if name in TREES else [3, 1]
    assert [found.model.length(request) for request in found.requests] == expected
    assert len(found.model.batched(found.requests)) == len(found.requests)
    assert len(requests_from(name, file_for(name), count=1, **SMALL).requests) == 1
    if name in TREES:
        assert [len(labels) for labels in found.model.batched(found.requests)] == [3, 1, 5]


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_generated_requests_are_seeded_and_their_cells_counted(name):
    first, same, other = (requests_from(name, count=4, seed=seed, **SMALL) for seed in (1, 1, 2))
    assert repr(first.requests) == repr(same.requests) != repr(other.requests)
    assert first.source.startswith("generated")
    if name != "lstm-nmt":
        assert [taken(first.model, request) for request in first.requests] == list(map(num_cells, first.requests))


def test_a_translation_is_as_long_as_the_line_beside_it(file_for, tmp_path):
    path = file_for("lstm-nmt")
    found = requests_from("lstm-nmt", path, **SMALL)
    assert [(request["source"].tolist(), request["words"]) for request in found.requests] == [([3, 4, 5], 2), ([6], 1)]
    (tmp_path / "pairs.de").write_text("x\n")
    with pytest.raises(DataError, match=r"pairs\.en: expected one other file .* found pairs\.de, pairs\.vi"):
        requests_from("lstm-nmt", path)
    with pytest.raises(DataError, match="no such file"):
        requests_from("lstm-nmt", tmp_path / "absent.en")


def test_words_are_counted_in_the_training_file_beside(tmp_path):
    (tmp_path / "train.txt").write_text("often|O " * 5 + "seldom|X " * 4)
    (tmp_path / "dev.txt").write_text("seldom|O often|O new|O\n")
    found = requests_from("bilstm-tagger-char", tmp_path / "dev.txt", **SMALL)
    assert found.requests[0]["words"].tolist() == [-1, 3, -1]
    assert [len(spelling) for spelling in found.requests[0]["spellings"]] == [8, 5]
    plain = requests_from("bilstm-tagger", tmp_path / "dev.txt", **SMALL)
    assert plain.requests[0].tolist() == [4, 3, 0]


def test_lattices_are_made_of_sentences_and_a_list_of_words(tmp_path):
    (tmp_path / "sentences").write_text("你0\tO\n好1\tO\n世0\tO\n界1\tX\n", encoding="utf-8")
    (tmp_path / "words").write_text("坏人\t3\n世界\t1\n你好世\n", encoding="utf-8")
    found = requests_from("latticegru", tmp_path / "sentences", words=tmp_path / "words", **SMALL)
    arcs = found.requests[0]["arcs"]
    assert arcs[arcs[:, 1] - arcs[:, 0] > 1].tolist() == [[0, 3, 1], [2, 4, 0]]  # only words that occur have ids
    assert found.model.words == 2


@pytest.mark.parametrize("name", WORKLOADS)
def test_an_empty_file_is_refused(tmp_path, name):
    path = tmp_path / "empty.txt"
    path.write_text("")
    (tmp_path / "empty.vi").write_text("")
    with pytest.raises(DataError, match=r"empty\.txt"):
        requests_from(name, path)


def test_what_cannot_be_asked_for_is_refused(tmp_path, file_for):
    with pytest.raises(OptionError, match="Did you mean 'latticelstm'"):
        requests_from("latticelstn")
    with pytest.raises(OptionError, match="list of words makes lattices"):
        requests_from("treegru", file_for("treegru"), words=tmp_path / "words")
    with pytest.raises(OptionError, match="count must be at least 1"):
        requests_from("treegru", count=0)
    with pytest.raises(OptionError, match="has no option --layers"):
        requests_from("treegru", count=1, layers=2)
    (tmp_path / "bare.txt").write_text("1\n1\n0\n0\n")
    with pytest.raises(DataError, match=r"bare\.txt: lattice 1 has no arcs"):
        requests_from("latticegru", tmp_path / "bare.txt")


def test_options_that_are_none_are_left_to_the_model():
    assert requests_from("treegru", count=1, hidden=None, max_batch=4).model.leaf.module.candidate.out_features == 256


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mvrnn", "latticegru", "lstm-nmt"])
def test_workloads_are_measured(command, tmp_path, read_json, name):
    path = tmp_path / "out.json"
    small = ("--hidden", 4, "--max-batch", 4, "--requests", 3, "--policy", "cellular")
    done = command("bench", name, *small, "--json", path)
    assert done.exit_code == 0, done.output
    assert read_json(path)[0]["requests"] == 3


def test_workloads_are_counted_in_cells():
    assert make_workload("mvrnn", count=3).cells.min() >= 2 * 19
    with pytest.raises(OptionError, match="takes one file"):
        make_workload("mvrnn", lengths="fixed:3")


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        pytest.param("treelstm-2type", TREE_LINES, [3, 1, 5], marks=pytest.mark.slow, id="trees"),
        pytest.param("latticelstm", json.dumps({"arcs": [[0, 1, 3], [1, 2, 4], [0, 2, 5]]}), [2], id="lattices"),
    ],
)
def test_trees_and_lattices_are_run_from_files(command, tmp_path, name, content, wanted):
    (tmp_path / "in").write_text(content)
    small = ("--hidden", 4, "--max-batch", 4)
    done = command("run", name, "--input", tmp_path / "in", "--output", tmp_path / "out", *small)
    assert done.exit_code == 0, done.output
    lines = (tmp_path / "out").read_text().splitlines()
    assert [len(json.loads(line)["result"]) for line in lines] == wanted


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lengths"), [("latticelstm", [2, 1]), ("bilstm-tagger-char", [3, 1])])
def test_files_of_data_are_run_as_they_are_learnt_from(command, tmp_path, file_for, name, lengths):
    small = ("--hidden", 4, "--max-batch", 4)
    done = command("run", name, "--input", file_for(name), "--output", tmp_path / "out", *small)
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [(line["index"], len(line["result"])) for line in lines] == list(enumerate(lengths))


def test_what_is_neither_json_nor_a_file_of_lattices_is_refused(command, tmp_path):
    (tmp_path / "in").write_text("the cat\n")
    done = command("run", "latticelstm", "--input", tmp_path / "in", "--output", tmp_path / "out")
    assert isinstance(done.exception, DataError)
    assert "JSON" in str(done.exception)


@pytest.mark.parametrize("name", ["latticegru", "mvrnn"])
def test_lattices_and_trees_are_simulated_as_they_are(name):
    shapes = blueprint(name, lambda: zoo.make(name, hidden=4))
    work = simulated.make(name, shapes, (), 20)
    assert work.source == f"generated {'lattices' if name in LATTICES else 'trees'}"
    assert len({request.graph.num_nodes for request in work.draw(0, 20)}) > 5


def test_real_files_become_requests(shared_data):
    files = {"treegru": "sst/dev.txt", "latticelstm": "lattice_edbatch/dev.txt", "lstm-nmt": "iwslt15_envi/tst2012.en",
             "bilstm-tagger-char": "wikiner_en/dev.txt"}  # fmt: skip
    counts = {"treegru": 1101, "latticelstm": 113, "lstm-nmt": 1553, "bilstm-tagger-char": 1696}
    for name, file in files.items():
        if not (shared_data / file).exists():
            pytest.skip(f"no {file} at hand")
        found = requests_from(name, shared_data / file, **SMALL)
        assert len(found.requests) == counts[name]
        with torch.no_grad():
            assert len(found.model.batched(found.requests[:2])) == 2
        assert np.all([found.model.length(request) > 0 for request in found.requests[:50]])
