"""The forms in which a bound cell runs: the module itself, the whole graph, and the graph in two parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, fx, nn

from batchmaker.compile.dataflow import CannotRewriteError, TracedCell
from batchmaker.compile.export import flat_outputs
from batchmaker.compile.lower import Packer
from batchmaker.compile.node_loop import NodeLoop, find_node_loop
from batchmaker.compile.opaque import Opaque
from batchmaker.compile.program import Program
from batchmaker.compile.recurrent_cells import Recurrence, find_recurrence
from batchmaker.compile.row_trial import RANDOM, Batch, Tried, in_sizes, is_large
from batchmaker.compile.split import Split, compile_whole, split_cell
from batchmaker.compile.state_loop import StateLoop, find_state_loop
from batchmaker.errors import ModelError, RowsError, ShapeError
from batchmaker.graph.spec import ValueSpec

if TYPE_CHECKING:
    from batchmaker.compile.same_bits import SameBits

CPU = torch.device("cpu")
_SAME_INTEGERS = 0.75
_mode_of = attrgetter("training")


def _copy_on(module: nn.Module, device: torch.device) -> nn.Module:
    """Return the module itself if it is on the device, else a copy on the device."""
    return module if device == CPU else copy.deepcopy(module).to(device)


@final
class PlainModule:
    """The module itself, as a program on a device.

    outputs: rows that it must return. tried: what it gave for the rows of its trial. num_own: the first inputs are
    made for one call alone, so the module may write into them.
    """

    def __init__(
        self,
        module: nn.Module,
        where: str,
        outputs: tuple[ValueSpec, ...],
        device: torch.device,
        tried: Tried,
        num_own: int = 0,
    ) -> None:
        self.module, self.where, self.device, self.tried = module, where, device, tried
        self._num_own = num_own
        self._outputs = outputs
        self._copy: nn.Module | None = None
        self._parts: tuple[nn.Module, ...] = ()  # of the copy
        self._modes = list(map(_mode_of, module.modules()))

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the module on copies, because an unknown module may write into its inputs.

        Raises ShapeError if the outputs differ from those at binding: they may depend on the values; ModelError if
        somebody has put a part into another mode since.
        """
        if self._copy is None:
            module = _copy_on(self.module, self.device)
            self._parts = tuple(module.modules())
            self._copy = module  # last: workers share this form
        if list(map(_mode_of, self._parts)) != self._modes:
            raise ModelError(
                f"{self.where}: it runs as it is, and its module is in another mode than at its first use, such as by "
                "train(). Serve a copy (copy.deepcopy) of a network that is trained meanwhile."
            )
        own = len(inputs) if isinstance(self.module, Opaque) else self._num_own
        arguments = (*inputs[:own], *[value.clone() for value in inputs[own:]])
        with torch.no_grad():
            made = flat_outputs(self._copy(*arguments), self.where)
        for index, (output, spec) in enumerate(zip(made, self._outputs, strict=True)):
            if output.shape != (len(inputs[0]), *spec.shape):
                raise ShapeError(
                    f"{self.where}, output {index}: got shape {tuple(output.shape)} for {len(inputs[0])} rows, "
                    f"expected rows of {spec}, as at its first use. The shape of a row may not depend on its values."
                )
        return made


@final
class CellForms:
    """The common part of all splits of one cell: its graph, or the module itself without a graph.

    Each form is tried when it is made: one that gives other numbers than the module gives for single rows is not used.
    unplanned: for a planned cell, a function from the number of step inputs to the graph to split instead, or None
    to split this one. deterministic: a row has the same bits in every batch, so the only form is the whole cell, at
    sizes at which this holds, `batch_sizes`. notes: on forms that are not used, and on these sizes.

    Raises RowsError if it is to be deterministic and cannot be.
    """

    def __init__(
        self,
        plain: PlainModule,
        graph: TracedCell | None,
        packer: Packer | None = None,
        unplanned: Callable[[int], TracedCell | None] | None = None,
        *,
        deterministic: bool = False,
    ) -> None:
        self._plain = plain
        self._graph = graph
        self._packer = packer or Packer()
        self._unplanned = unplanned
        self._deterministic = deterministic
        self._whole: Program | None = None
        self.notes: tuple[str, ...] = ()
        self.batch_sizes: tuple[int, ...] = ()
        if deterministic:
            self._whole = whole = self._with_same_bits()
            self.notes += (whole.note,)
            self.batch_sizes = whole.sizes

    @property
    def is_traced(self) -> bool:
        """Whether there is a graph, so that a form may hold copies of weights."""
        return self._graph is not None

    @property
    def sample(self) -> Batch:
        """One row of each output, of the real inputs."""
        return self._plain.tried.sample

    @property
    def example(self) -> Batch:
        """The real row of each input, [1, *shape]."""
        return tuple([rows[:1].to(self._plain.device) for rows in self._plain.tried.inputs])

    def whole(self) -> Program:
        """Return the whole cell as a program, compiled at first use."""
        if self._whole is None:
            graph = self._graph
            made = self._plain if graph is None else compile_whole(graph, self._packer)
            self._whole = (
                made if self._is_right(lambda rows, sizes: in_sizes(made, rows, sizes), graph) else self._plain
            )
        return self._whole

    def node_loop(self, inputs: Sequence[ValueSpec], outputs: Sequence[ValueSpec]) -> NodeLoop | None:
        """Return the compiled call for tasks of single nodes; None if there is none, or it gives other numbers."""
        graph, device = self._graph, self._plain.device
        if graph is None or device != CPU or self._deterministic:
            return None
        if any(spec.dtype in ("bfloat16", "float16") for spec in (*inputs, *outputs)):
            return None
        loop = find_node_loop(graph, inputs, outputs)
        if loop is None or not self._plain.tried.computes_the_same(lambda rows, _: loop.call(rows, outputs), device):
            return None
        return loop

    def state_loop(
        self, split: Split, state: Sequence[ValueSpec], outputs: Sequence[ValueSpec], num_step_inputs: int
    ) -> StateLoop | None:
        """Return the loop of a split cell's steps; None if there is none, or it gives other numbers."""
        device = self._plain.device
        if split.graph is None or device != CPU:
            return None
        loop = find_state_loop(split.graph, (*split.hoisted, *state), len(split.hoisted), self._packer)
        if loop is None:
            return None

        def run(rows: Batch, _: Sequence[int]) -> Batch:
            arguments = (*split.hoist(*rows[:num_step_inputs]), *rows[num_step_inputs:])
            made = loop.call(arguments, outputs)
            if not are_same_integers(made, split.step(*arguments)):
                raise ValueError("other integers")
            return made

        try:
            return loop if self._plain.tried.computes_the_same(run, device) else None
        except ValueError:
            return None

    def split(self, inputs: tuple[ValueSpec, ...], num_step_inputs: int) -> tuple[Split, tuple[str, ...]]:
        """Return the cell in two parts, and a note on the split."""
        if self._graph is None or self._deterministic:
            return self._all_in_step(inputs[:num_step_inputs], self.whole()), ()
        try:
            split, notes = self._cut(self._graph, num_step_inputs)
        except CannotRewriteError as error:
            return self._all_in_step(inputs[:num_step_inputs], self.whole()), (f"nothing hoisted: {error}",)

        def run(rows: Batch, sizes: Sequence[int]) -> Batch:
            hoisted = split.hoist(*rows[:num_step_inputs])
            return in_sizes(split.step, (*hoisted, *rows[num_step_inputs:]), sizes)

        if not self._is_right(run, self._graph):
            return self._all_in_step(inputs[:num_step_inputs], self._plain), ()
        count = split.num_hoisted_calls
        return split, (*notes, *((f"{count} operations hoisted out of the step",) if count else ()))

    def _with_same_bits(self) -> SameBits:
        """Return the whole cell as a program that gives a row the same bits in every batch."""
        from batchmaker.compile.same_bits import decides, with_same_bits  # deterministic engines alone need it

        plain, graph = self._plain, self._graph
        if RANDOM in plain.tried.notes:
            raise RowsError(
                f"{plain.where}: draws random numbers from torch, which depend on what ran before; with "
                "deterministic=True draw them by a seed and a step, with bm.sampling"
            )
        count = len(self.sample)
        is_seen, deciding = all(values.is_floating_point() for values in self.sample), list[fx.Node]()
        if graph is not None:
            with suppress(CannotRewriteError):
                deciding, is_seen = decides(graph), True
        made = plain if graph is None else compile_whole(graph, self._packer, deciding)
        if not self._is_right(lambda rows, sizes: in_sizes(lambda *part: made(*part)[:count], rows, sizes), graph):
            made, is_seen = plain, all(values.is_floating_point() for values in self.sample)
        with torch.no_grad():
            return with_same_bits(
                made,
                plain.tried.inputs,
                plain.tried.batch_sizes,
                plain.where,
                num_outputs=count,
                is_seen=is_seen,
                is_large=is_large(plain.module),
            )

    def _is_right(self, form: Callable[[Batch, Sequence[int]], Batch], graph: TracedCell | None) -> bool:
        """Whether a form of the graph gives what the module gives. Otherwise a note is kept."""
        if graph is None or self._plain.tried.computes_the_same(form, self._plain.device):
            return True
        self.notes = ("left as it is: made fast, it gave other numbers than the module gives for single rows",)
        return False

    def _cut(self, graph: TracedCell, num_step_inputs: int) -> tuple[Split, tuple[str, ...]]:
        other = None if self._unplanned is None else self._unplanned(num_step_inputs)
        if other is None:
            return split_cell(graph, num_step_inputs, self._packer), ()
        return split_cell(other, num_step_inputs, Packer(fuse=True)), ("not planned in runs: its steps were no faster",)

    def recurrence(self, num_step_inputs: int) -> Recurrence | None:
        return None if self._graph is None else find_recurrence(self._graph, num_step_inputs)

    def _all_in_step(self, step_inputs: tuple[ValueSpec, ...], program: Program) -> Split:
        return Split(_hand_on, program, step_inputs, 0)


def are_same_integers(made: Batch, wanted: Batch) -> bool:
    """Whether integers and bools are those wanted. A few may jump where a float is nearly the same."""
    pairs = [pair for pair in zip(made, wanted, strict=True) if not pair[0].is_floating_point()]
    return all(float((mine == right).float().mean()) > _SAME_INTEGERS for mine, right in pairs if mine.numel())


def _hand_on(*inputs: Tensor) -> tuple[Tensor, ...]:
    return inputs
