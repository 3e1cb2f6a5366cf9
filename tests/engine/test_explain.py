"""`Engine.explain` says in which form each cell runs, and why in no faster one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.compile.binding import BoundCell, bind
from batchmaker.compile.run_form import A_NUMBER, AT_ITS_LENGTH, LOOP, MODULE, NODE_LOOP, PROGRAM, STATE_LOOP, run_form
from batchmaker.engine.explain import Explanation
from batchmaker.executor.null import NullExecutor
from batchmaker.graph.spec import ValueSpec
from batchmaker.kernels.cpu.loop import can_loop
from insides import say_faster

SIZE, WORDS = 8, 20
ROW, TOKEN = ValueSpec((SIZE,), "float32"), ValueSpec((), "int64")
NOT_TOLD = "not told by this executor"
LAMBDA = "the function '<lambda>'"

needs_loops = pytest.mark.skipif(not can_loop(torch.zeros(1)), reason="no compiled loops with NUMBA_DISABLE_JIT=1")


class Greedy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru, self.out = nn.Embedding(WORDS, SIZE), nn.GRUCell(SIZE, SIZE), nn.Linear(SIZE, WORDS)

    def forward(self, word: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.gru(self.embed(word), h)
        return self.out(h).argmax(-1), h


class Untraced(nn.Module):
    """torch.export refuses it, because it branches on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(-x if float(torch.ones(1)) > 2.0 else x)
        return result


class Sorted(nn.Module):
    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return (x + h).sort(-1)[0]


def bound(module: nn.Module, *inputs: ValueSpec, num_step_inputs: int | None = None) -> BoundCell:
    return bind(module.eval(), inputs, name="cell", num_step_inputs=num_step_inputs)


def measured(cell: BoundCell, faster: list[bool]) -> BoundCell:
    """The cell as if its loop had been timed: faster for 1, 2, ... rows?"""
    say_faster(cell, np.array([False, *faster]))
    return cell


def test_a_module_that_cannot_be_traced_runs_as_it_is_and_says_why() -> None:
    form = run_form(bound(Untraced(), ROW))
    assert form.form == MODULE
    assert form.why.startswith("left as it is: torch.export failed")


def test_a_chain_that_is_no_recurrent_layer_runs_as_a_program() -> None:
    form = run_form(bound(Sorted(), ROW, ROW, num_step_inputs=1))
    assert (form.form, form.until) == (PROGRAM, "")
    assert "no compiled loop: a step is not that of one LSTM, GRU or RNN" in form.why


def test_single_nodes_without_a_loop_run_as_a_program() -> None:
    form = run_form(bound(Sorted(), ROW, ROW))
    assert form.form == PROGRAM
    assert form.why.startswith("no node loop: it has other operations than look-ups")


@needs_loops
@pytest.mark.parametrize(
    ("faster", "form", "why"),
    [([True] * 9, LOOP, ""),
     ([], LOOP, "not measured yet"),
     ([False] * 9, PROGRAM, "compiled loop was measured to be slower"),
     ([True, True, False, True], LOOP, "measured to be faster: 1 to 2, 4 rows a step, else the optimised program")],
)  # fmt: skip
def test_a_recurrent_layer_runs_in_a_loop_where_that_was_measured_to_be_faster(
    faster: list[bool], form: str, why: str
) -> None:
    found = run_form(measured(bound(nn.GRUCell(SIZE, SIZE), ROW, ROW, num_step_inputs=1), faster))
    assert found.form == form
    assert why in found.why
    assert bool(why) == bool(found.why)


@needs_loops
def test_weights_for_which_there_is_no_loop_are_named() -> None:
    cell = bound(nn.GRUCell(SIZE, SIZE).double(), *[ValueSpec((SIZE,), "float64")] * 2, num_step_inputs=1)
    assert run_form(cell).why == "no compiled loop for recurrent weights of float64 here"


@needs_loops
@pytest.mark.parametrize(
    ("ends", "form", "until"),
    [({A_NUMBER}, LOOP, "in the compiled loop"),
     ({A_NUMBER, AT_ITS_LENGTH}, LOOP, "in the compiled loop"),
     ({AT_ITS_LENGTH}, LOOP, ""),
     ({LAMBDA}, PROGRAM, f"step by step if it is {LAMBDA}: only a whole number is tested in the compiled loop"),
     ({LAMBDA, A_NUMBER}, LOOP, f"step by step if it is {LAMBDA}"),
     ({LAMBDA, AT_ITS_LENGTH}, LOOP, f"step by step if it is {LAMBDA}")],
)  # fmt: skip
def test_loops_that_end_at_a_value_say_whether_it_is_tested_in_the_loop(ends: set[str], form: str, until: str) -> None:
    cell = measured(bound(Greedy(), TOKEN, ROW, num_step_inputs=0), [True] * 9)
    found = run_form(cell, frozenset(ends))
    assert found.form == form
    assert found.until.startswith(until)
    assert bool(until) == bool(found.until)


@needs_loops
def test_a_loop_of_a_plain_recurrent_layer_is_tested_between_its_steps() -> None:
    cell = measured(bound(nn.GRUCell(SIZE, SIZE), ROW, ROW, num_step_inputs=1), [True] * 9)
    found = run_form(cell, frozenset({A_NUMBER}))
    assert found.form == PROGRAM
    assert found.until.startswith("step by step: the compiled loop of a recurrent layer tests nothing")


# --- an engine -------------------------------------------------------------------------------------------------------


class Writer(bm.Model):
    example_request = (3, 4)

    def __init__(self) -> None:
        self.step, self.judge = bm.Cell(Greedy(), max_batch=8), bm.Cell(Untraced(), max_batch=8)
        self.tag = bm.Cell(nn.Sequential(nn.Linear(SIZE, 4), nn.Tanh()), max_batch=8)

    def unfold(self, words: Any) -> Any:
        word, h = self.step.run(words)
        word, h = self.step.loop((word, h), until=lambda word: word == 1, max_steps=5)
        return word.steps, self.judge(h), self.tag(h)


def forms(explanation: Explanation) -> dict[str, Any]:
    return {cell.cell: cell for cell in explanation.cells}


def test_an_engine_tells_the_form_of_each_cell_as_a_table_and_in_one_line(caplog: Any) -> None:
    caplog.set_level(logging.INFO, "batchmaker.engine")
    with bm.Engine(Writer(), threads=1) as engine:
        (line,) = [text for record in caplog.records if (text := record.getMessage()).startswith("started: ")]
        for part in ("policy auto", "cell 'step': ", "cell 'step loop': ", "cell 'judge': torch module as it is (left"):
            assert part in line
        assert f"until step by step if it is {LAMBDA}" in line or not can_loop(torch.zeros(1))
        before = forms(engine.explain())
        assert all(cell.in_loop == cell.one_by_one == 0 for cell in before.values()), "examples do not count"
        engine.map([(3, 4), (5,)] * 5, progress=False)
        after = forms(engine.explain())
        assert [after[name].used for name in ("step", "step loop", "judge", "tag")] == [
            "run", "loop", "single nodes", "single nodes",
        ]  # fmt: skip
        assert after["step loop"].in_loop + after["step loop"].one_by_one >= 1
        assert after["judge"].form == MODULE
        assert after["judge"].one_by_one >= 1
        if after["tag"].form == NODE_LOOP and not after["tag"].why:
            assert (after["tag"].in_loop >= 1, after["tag"].one_by_one) == (True, 0)
        assert any("folded" in note for note in after["step"].notes)
        table = str(engine.explain())
    assert repr(engine.explain()) == str(engine.explain())
    head, *rows = table.splitlines()
    assert " ".join(head.split()) == "cell used as runs as steps in one call one by one"
    assert [row.split("  ")[0] for row in rows if not row.startswith(" ")] == ["step", "step loop", "judge", "tag"]
    assert max(map(len, rows)) <= 120
    assert "torch.export failed" in table


def test_an_engine_that_has_used_no_cell_says_so() -> None:
    class Bare(Writer):
        example_request = None

    engine = bm.Engine(Bare(), threads=1)
    assert "no cell has been used yet" in str(engine.explain())
    assert engine.explain().cells == ()
    engine.stop()


def test_the_page_for_model_authors_says_what_every_form_is() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text("utf-8")
    told = page.partition("## Which form a cell runs in")[2].partition("\n## ")[0]
    on_gpus = ("one GPU kernel for all steps of a task", "recorded GPU launch", "GPU launches one by one")
    for form in (LOOP, STATE_LOOP, NODE_LOOP, PROGRAM, MODULE, *on_gpus, NOT_TOLD, "copy ROWS", "element ROWS"):
        assert f"`{form}`" in told


def test_engines_that_do_not_run_cells_say_so() -> None:
    class Whole(Writer):
        example_request = None

        def batched(self, requests: Any) -> Any:
            return [0 for _ in requests]

    whole = bm.Engine(Whole(), "padded", threads=1)
    assert "it computes whole requests" in str(whole.explain())
    whole.stop()
    with bm.Engine(Writer(), executor=NullExecutor()) as engine:
        assert {cell.form for cell in engine.explain().cells} == {NOT_TOLD}
