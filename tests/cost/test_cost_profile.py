"""profile.json: written, read back, and refused where it is not what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchmaker.cost import (
    CellLatency,
    CostProfile,
    LatencyTable,
    LengthProfile,
    Overhead,
    PredictedLength,
    ProfileOptions,
)
from batchmaker.errors import DataError

CELLS = tuple(CellLatency(name, (1, 4), (0.001, 0.002), (0.0015, 0.003)) for name in ("encoder", "decoder"))


@pytest.fixture
def written(tmp_path: Path) -> Path:
    source = np.repeat(np.arange(1, 11), 20)
    length = PredictedLength("decoder", "encoder", LengthProfile.from_pairs(source, 2 * source))
    options = ProfileOptions("float32", 1, "a machine, 2 cores", "abc", hidden=64)
    CostProfile("seq2seq", options, LatencyTable(CELLS), (length,)).write(tmp_path / "profile.json")
    return tmp_path / "profile.json"


def test_what_was_written_is_read(written: Path):
    profile = CostProfile.read(written)
    assert (profile.model, profile.options.hidden, profile.options.layers) == ("seq2seq", 64, None)
    assert profile.latency == LatencyTable(CELLS)
    length = profile.length_of("decoder")
    assert length is not None
    assert (length.cell, length.given) == ("decoder", "encoder")
    assert length.profile.num_samples == 200
    assert length.profile.remaining(np.array([2, 10]), np.array([1, 0]), 0.75).tolist() == [3, 20]
    assert profile.length_of("encoder") is None


def test_writing_again_what_was_read_changes_nothing(written: Path, tmp_path: Path):
    CostProfile.read(written).write(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == written.read_bytes()


def test_the_overhead_is_kept_and_may_be_missing(written: Path, tmp_path: Path):
    assert CostProfile.read(written).overhead is None
    older = json.loads(written.read_text())
    del older["overhead"]
    written.write_text(json.dumps(older))
    profile = replace(CostProfile.read(written), overhead=Overhead(1e-4, 1e-6, 2e-4, 3e-4))
    profile.write(tmp_path / "again.json")
    assert CostProfile.read(tmp_path / "again.json").overhead == profile.overhead


@pytest.mark.parametrize("seconds", [-1e-6, float("inf"), float("nan")])
def test_an_overhead_is_a_time(seconds: float):
    with pytest.raises(DataError, match="request_s"):
        Overhead(request_s=seconds)


def test_an_empty_length_profile_predicts_nothing_and_is_refused():
    with pytest.raises(DataError, match="'decoder' is empty"):
        PredictedLength("decoder", None, LengthProfile())


BUCKET = ("lengths", 0, "buckets", 0)


@pytest.mark.parametrize(
    ("place", "value", "what"),
    [
        (("version",), 2, "'version' is 2"),
        (("version",), None, "version"),
        (("model",), 3, r"\$\.model"),
        (("latency", "cells"), [], "no cells"),
        (("latency", "cells", 0, "batch"), [], "'encoder': no batch size"),
        (("latency", "cells", 0, "median_s", 0), -1.0, "'encoder': median_s has -1"),
        (("latency", "cells", 1, "name"), "encoder", "'encoder' twice"),
        (("median",), [1.0], "unknown field `median`"),
        (("options", "threads"), "two", r"\$\.options\.threads"),
        (("lengths", 0, "cell"), "decodr", r"lengths\[0\]\.cell is 'decodr'"),
        (("lengths", 0, "given"), "nobody", r"lengths\[0\]\.given is 'nobody'"),
        (("lengths", 0, "buckets"), [], r"lengths\[0\]\.buckets"),
        (("lengths", 0, "buckets"), [{"given_up_to": None, "steps": [], "runs": []}], r"lengths\[0\]: .* is empty"),
        ((*BUCKET, "given_up_to"), None, r"lengths\[0\]\.buckets: only the last"),
        ((*BUCKET, "given_up_to"), 10**6, "ascending"),
        ((*BUCKET, "steps", 0), 0, r"buckets\[0\]: 'steps'"),
        ((*BUCKET, "steps", 0), 10**9, "longer than the longest"),
        ((*BUCKET, "runs", 0), -5, r"buckets\[0\]: 'steps' and 'runs'"),
        ((*BUCKET, "runs"), [], r"buckets\[0\]: \d+ 'steps' and 0 'runs'"),
    ],
)
def test_a_wrong_field_is_named_with_its_file(written: Path, place: tuple[Any, ...], value: Any, what: str):
    content = json.loads(written.read_text(encoding="utf-8"))
    within = content
    for key in place[:-1]:
        within = within[key]
    within[place[-1]] = value
    written.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(DataError, match=what) as caught:
        CostProfile.read(written)
    assert str(caught.value).startswith(str(written))
    assert "batchmaker profile" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"null", b"\xff\xfe", b"[" * 100_000, b'{"version": 1}'])
def test_files_that_are_no_profile_are_refused(written: Path, content: bytes):
    written.write_bytes(content)
    with pytest.raises(DataError, match=r"profile\.json: malformed"):
        CostProfile.read(written)


def test_a_file_that_is_missing_or_cannot_be_written_is_named(tmp_path: Path, written: Path):
    with pytest.raises(DataError, match=r"nothing\.json: cannot be read"):
        CostProfile.read(tmp_path / "nothing.json")
    with pytest.raises(DataError, match="cannot be written"):
        CostProfile.read(written).write(tmp_path / "no folder" / "profile.json")
