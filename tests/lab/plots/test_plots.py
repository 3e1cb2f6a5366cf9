"""Pictures are written, or the error says why not."""

from __future__ import annotations

import pytest

from batchmaker.engine.timeline import Span
from batchmaker.errors import DataError
from batchmaker.lab.plots.pictures import Curve, DrawnLanes, draw_profile, draw_timeline

CURVE = Curve("cell", [1, 2, 4], [1.0, 1.1, 2.0], [1000.0, 1818.0, 2000.0], 4)


def test_a_timeline_is_written_even_where_nothing_ran(tmp_path):
    lanes = [DrawnLanes("one", "note", [Span(1, 0, 0.0, 1.0, 0.5)]), DrawnLanes("two", "nothing", [])]
    draw_timeline(tmp_path / "a.png", lanes, [0.0, 0.0], 1.0, "subtitle")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_a_profile_is_written(tmp_path):
    draw_profile(tmp_path / "b.png", [CURVE], "subtitle")
    assert (tmp_path / "b.png").stat().st_size > 1000


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match="missing"):
        draw_profile(tmp_path / "missing" / "b.png", [CURVE], "subtitle")
