"""Each built-in network has generated requests that it takes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from batchmaker.cli.bench import reference
from batchmaker.cli.workload import make_workload
from batchmaker.errors import OptionError
from batchmaker.lab import zoo

SHAPES = {"resnet50": (3, 224, 224), "vgg16": (3, 224, 224), "mobilenet": (3, 224, 224)}
PITCHES = {"deepspeech2": 161, "las": 40, "rnnt": 80}


def test_prompts_are_seeded_and_continued_by_some_tokens():
    first, same = (make_workload("rwkv", count=5, seed=3) for _ in range(2))
    assert all(np.array_equal(a["prompt"], b["prompt"]) for a, b in zip(first.requests, same.requests, strict=True))
    assert first.chains.tolist() == [[len(r["prompt"]) - 1, r["max_tokens"]] for r in first.requests]
    assert make_workload("mamba", lengths="fixed:7", count=2).chains[:, 0].tolist() == [6, 6]
    with pytest.raises(OptionError, match="generated requests only"):
        make_workload("mamba", data=["a.txt"])


def test_noise_has_its_own_numbers_of_steps():
    first, same = (make_workload("diffusion", count=50, seed=3) for _ in range(2))
    assert [r["steps"] for r in first.requests] == [r["steps"] for r in same.requests] == first.chains[:, 0].tolist()
    assert {request["noise"].shape for request in first.requests} == {(256,)}
    assert 10 <= first.chains.min() < first.chains.max() <= 50
    assert make_workload("diffusion", lengths="fixed:7", count=2).chains.tolist() == [[7], [7]]
    assert make_workload("diffusion", lengths="clip:12", count=20).chains.max() == 12
    with pytest.raises(OptionError, match="generated requests only"):
        make_workload("diffusion", data=["a.txt"])


@pytest.mark.parametrize("model", ["gnmt", "transformer", "bert", "early-exit", "experts", *PITCHES, *SHAPES])
def test_requests_are_seeded_and_fit_the_network(model):
    first, same = (make_workload(model, count=5, seed=3) for _ in range(2))
    assert len(first) == len(first.cells) == 5
    sources = [request["source"] if isinstance(request, dict) else request for request in first.requests]
    assert all(np.array_equal(a, b) for a, b in zip(sources, [
        request["source"] if isinstance(request, dict) else request for request in same.requests
    ], strict=True))  # fmt: skip
    if model in SHAPES:
        assert {source.shape for source in sources} == {SHAPES[model]}
    elif model in ("gnmt", "transformer"):
        assert max(len(source) for source in sources) <= 80
        assert all(1 <= request["words"] <= 80 for request in first.requests)
        assert first.chains.tolist() == [[len(r["source"]), r["words"]] for r in first.requests]
    elif model == "bert":
        assert max(map(len, sources)) <= 128
        assert first.chains.tolist() == [[1]] * 5
    elif model in ("early-exit", "experts"):
        assert {source.shape for source in sources} == {(256,)}
        assert first.chains.tolist() == [[1]] * 5
    else:
        assert {source.shape[1] for source in sources} == {PITCHES[model]}
        assert first.chains[:, 0].tolist() == [len(source) for source in sources]
    if model == "las":
        assert max(map(len, sources)) <= 1600


def test_lengths_and_files_are_for_those_that_have_them(text_file):
    assert [len(request) for request in make_workload("deepspeech2", lengths="fixed:30", count=2).requests] == [30, 30]
    assert make_workload("las", lengths="clip:200", count=3).chains[:, 0].max() <= 200
    assert make_workload("transformer", lengths="fixed:7", count=2).chains[:, 0].tolist() == [7, 7]
    with pytest.raises(OptionError, match="images are all alike"):
        make_workload("vgg16", lengths="fixed:3")
    with pytest.raises(OptionError, match="vectors are all alike"):
        make_workload("experts", lengths="fixed:3")
    for model in ("las", "rnnt", "early-exit"):
        with pytest.raises(OptionError, match="generated requests only"):
            make_workload(model, data=[text_file])
    assert make_workload("gnmt", data=[text_file, text_file]).chains.shape == (4, 2)


@pytest.fixture
def tiny(monkeypatch):
    """Networks that a test can measure."""
    make = zoo.MODELS["bert"], zoo.MODELS["mobilenet"]

    def bert(vocabulary_size=30_522, hidden=8, layers=1, dtype="float32", max_batch=4, seed=0):
        return make[0](vocabulary_size, hidden, 2, 8, layers, dtype=dtype, max_batch=max_batch, seed=seed)

    def mobilenet(dtype="float32", max_batch=2, seed=0):
        return make[1](0.03, image=32, classes=3, dtype=dtype, max_batch=max_batch, seed=seed)

    monkeypatch.setattr(zoo, "MODELS", {**zoo.MODELS, "bert": bert, "mobilenet": mobilenet})
    monkeypatch.setattr(reference, "SECONDS_EACH", 0.005)


@pytest.mark.slow
def test_a_network_that_is_alike_for_all_is_measured(command, tmp_path, read_json, tiny):
    path = tmp_path / "out.json"
    done = command(
        "bench", "bert", "--requests", 12, "--max-batch", 4, "--padded-batch", 4, "--no-sweep", "--json", path
    )
    assert done.exit_code == 0, done.output
    cellular, padded = read_json(path)
    assert cellular["requests"] == padded["requests"] == 12
    assert cellular["useful_cells_per_s"] == pytest.approx(cellular["served_rps"])
    assert cellular["reference_cells_per_s"] > 0


@pytest.mark.slow
def test_images_are_read_as_arrays(command, tmp_path, read_json, tiny):
    lines = [json.dumps(np.full((3, 32, 32), value).tolist()) for value in (0.0, 1.0)]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, "[1, [2]]"]))
    done = command("run", "mobilenet", "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl")
    assert done.exit_code == 1
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [len(answer.get("result", ())) for answer in answers] == [3, 3, 0]
    assert "not an array" in answers[2]["error"]
