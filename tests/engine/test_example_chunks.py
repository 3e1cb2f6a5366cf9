"""Cells that only chunks of a sequence reach are bound, saved and prepared by the model's example chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import batchmaker as bm
from batchmaker.errors import ModelError, SavedModelError


class Listener(bm.Model):
    """Whole recordings go through one cell, live chunks through another."""

    example_request = torch.zeros(3, 4)
    example_chunks = (torch.zeros(1, 4), torch.zeros(2, 4))

    def __init__(self) -> None:
        self.whole = bm.Cell(nn.GRUCell(4, 5), max_batch=4)
        self.live = bm.Cell(nn.RNNCell(4, 5), max_batch=4)

    def unfold(self, frames: Any) -> Any:
        return self.whole.run(frames)

    def unfold_chunk(self, frames: Any, state: Any) -> Any:
        h = self.live.run(frames, state)
        return h, h


def names(engine: bm.Engine) -> set[str]:
    return {cell.name for cell in engine.registry.types}


def test_example_chunks_bind_the_cells_before_the_first_request_and_are_not_counted():
    with bm.Engine(Listener()) as engine:
        assert names(engine) == {"whole", "live"}
        assert engine.service["Listener"].answered == 0
        assert engine.num_sequences == 0


def test_an_engine_that_takes_no_sequences_starts_without_them():
    with bm.Engine(Listener(), max_sequences=0) as engine:
        assert names(engine) == {"whole"}


def test_a_wrong_example_chunk_is_named():
    model = Listener()
    model.example_chunks = [torch.zeros(1, 4), torch.zeros(1, 3)]
    with pytest.raises(ModelError, match="the model's example chunk failed"):
        bm.Engine(model).start()


def test_a_saved_model_keeps_its_example_chunks_and_the_cells_that_they_reach(tmp_path):
    model = Listener()
    bm.save(model, tmp_path / "saved")
    loaded = bm.load(tmp_path / "saved", model_class=Listener)
    assert [chunk.shape for chunk in loaded.example_chunks] == [(1, 4), (2, 4)]
    with bm.Engine(loaded) as engine, engine.open_sequence() as sequence:
        assert names(engine) == {"whole", "live"}
        frame = torch.randn(1, 4)
        torch.testing.assert_close(sequence.submit(frame).result(), model.live.module(frame)[0])


def test_saving_says_what_to_give_for_a_cell_that_only_chunks_reach(tmp_path):
    model = Listener()
    model.example_chunks = ()
    with pytest.raises(SavedModelError, match=r"'live'.*example_chunks if only unfold_chunk calls it"):
        bm.save(model, tmp_path / "saved")
