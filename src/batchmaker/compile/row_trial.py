"""The trial of a cell when it is bound: each row gives the same numbers alone and among others.

See docs/decisions/0027-rows-are-tried.md.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, final

import torch
from torch import Tensor, nn

from batchmaker.compile.export import flat_outputs, torch_dtype
from batchmaker.compile.mixing_operation import NoChance, is_mixed, mixing_operation
from batchmaker.compile.opaque import Opaque
from batchmaker.compile.rounding import distance, is_apart, is_rounding, largest, tolerance
from batchmaker.errors import RAISED_BY_USERS, RowsError, ShapeError
from batchmaker.graph.spec import ValueSpec

Batch = tuple[Tensor, ...]
"""A batch [n, *shape] per input or output."""

_LARGE: Final = 100.0
_LARGE_BYTES: Final = 1 << 20
"""A module with more bytes of weights is tried with fewer rows and batches: each call reads all of them."""
_MANY: Final = 64
_MANY_BYTES: Final = 4 << 20
"""Most rows, and bytes of them, in the largest batch that is tried."""
_DRAWS: Final = 4
"""A difference counts if other rows show one too, of so many draws: a choice between equal scores is rare."""
_SMALL: Final = 5
"""Made-up integers are below, where nothing says how many tokens there are."""
_FIRST_TOKENS, _OTHER_TOKENS = 16, 48
"""Where Python may take another path for a token, so many are tried: the first ones, which often mean something, and
others. Of a large module only a quarter."""
_ON_DEVICE: Final = 2e-2
"""The tolerance on other devices, whose products may round their factors to TF32."""

RANDOM: Final = "draws random numbers; its rows were compared without them"
CHANCE: Final = "draws random numbers, so its rows could not be compared with those of other batches"
CHAOTIC: Final = "rounding changes its results as much as other rows do, so its rows could not be compared"


@final
@dataclass(frozen=True, slots=True)
class TrialRows:
    """How a cell is tried when it is bound.

    rows: a real row [1, *shape] per input: of the model's example or of the first request; None where there is none.
    batch_sizes: those at which it will run. independent: whether its rows may share a batch. integer: in the place of
    integers of which no row is real.
    """

    rows: tuple[Tensor | None, ...] = ()
    batch_sizes: tuple[int, ...] = (1, 2, 3, 4, 6)
    independent: bool = True
    integer: int = 0

    def sizes(self) -> tuple[int, ...]:
        """Return the sizes at which the shapes of the outputs are found: two from two rows on, and one row."""
        several = self.batch_sizes[bisect_left(self.batch_sizes, 2) :][:2]
        return (*several, 1) if self.batch_sizes[0] == 1 else several

    def batch(self, inputs: Sequence[ValueSpec], num_rows: int) -> Batch:
        """Return so many rows: the real ones where they are known, else noise, or `integer`."""
        noise, generator = [], torch.Generator().manual_seed(0)
        for port, spec in enumerate(inputs):
            row, dtype = self._real_row(port, spec), torch_dtype(spec.dtype)
            if row is not None:
                noise.append(row.expand(num_rows, *spec.shape).clone())
            elif dtype.is_floating_point:
                noise.append(torch.randn((num_rows, *spec.shape), generator=generator).to(dtype))
            else:
                noise.append(torch.full((num_rows, *spec.shape), self.integer, dtype=dtype))
        return tuple(noise)

    def _real_row(self, port: int, spec: ValueSpec) -> Tensor | None:
        """Return the real row of an input, in its dtype, if it has this shape."""
        row = self.rows[port] if port < len(self.rows) else None
        return None if row is None or tuple(row.shape) != (1, *spec.shape) else row.to(torch_dtype(spec.dtype))


@final
@dataclass(frozen=True, slots=True)
class Tried:
    """Rows of a trial and what the module itself gives for each of them alone.

    inputs, outputs: a batch per input and output; no outputs if nothing could be compared. sample: one row per output,
    of the real inputs. run: runs the module for some rows, in operations. notes: what to tell of it.
    """

    inputs: Batch
    outputs: Batch
    sample: Batch
    batch_sizes: tuple[int, ...]
    tolerance: float
    run: Callable[[Batch], Batch]
    notes: tuple[str, ...] = ()

    def computes_the_same(self, form: Callable[[Batch, Sequence[int]], Batch], device: torch.device) -> bool:
        """Whether a form of the module gives each row the numbers that the module gave it alone, among other rows.

        form: takes a batch on the device, and the sizes at which it may run. Numbers that are not finite are not
        compared: a form may overflow elsewhere.
        """
        count = len(self.inputs[0]) if self.outputs and device.type != "meta" else 0
        within = self.tolerance if device.type == "cpu" else max(self.tolerance, _ON_DEVICE)
        for places in (list(range(count)), list(range(count - 1, 3, -2))):
            if not places:
                continue
            made = form(tuple([rows[places].to(device) for rows in self.inputs]), self.batch_sizes)
            for output, (results, wanted) in enumerate(zip(made, self.outputs, strict=True)):
                for place, row in enumerate(places):
                    if not self._alike(results[place : place + 1].cpu(), wanted[row : row + 1], row, output, within):
                        return False
        return True

    def _alike(self, result: Tensor, wanted: Tensor, row: int, output: int, within: float) -> bool:
        if not wanted.is_floating_point() or not bool(wanted.isfinite().all()):
            return True  # integers may jump where a float is nearly the same
        inputs = tuple([rows[row : row + 1] for rows in self.inputs])
        # A gate that is shut for one row is small there, and its rounding is that of an open one.
        scale = min(1.0, largest(self.outputs[output]))
        return not is_apart(result, wanted, within, scale) or is_rounding(
            distance(result, wanted), partial(self.run, inputs), output
        )


def in_sizes(run: Callable[..., Batch], rows: Batch, sizes: Sequence[int]) -> Batch:
    """Run rows in batches of these sizes, padded with copies of the first row, and return their outputs."""
    parts: list[Batch] = []
    count, largest = len(rows[0]), sizes[-1]
    for begin in range(0, count, largest):
        part = tuple([row[begin : begin + largest] for row in rows])
        size = sizes[bisect_left(sizes, len(part[0]))]
        room = size - len(part[0])
        padded = part
        if room:
            fill = [row[:1].expand(room, *row.shape[1:]) for row in rows]
            padded = tuple([torch.cat(both) for both in zip(part, fill, strict=True)])
        parts.append(tuple([made[: len(part[0])] for made in run(*padded)]))
    return parts[0] if len(parts) == 1 else tuple(map(torch.cat, zip(*parts, strict=True)))


def try_rows(
    module: nn.Module,
    inputs: Sequence[ValueSpec],
    trial: TrialRows,
    where: str,
    *,
    traced: bool,
    limits: Mapping[int, int],
) -> Tried:
    """Run rows alone and together, and return what they gave alone.

    module: runs on the CPU; nobody else runs it meanwhile. traced: whether it runs as a graph, whose operations are
    the same at every batch size. limits: number of tokens by input. Raises RowsError if a row gives other numbers
    among others than alone, by more than rounding, or if the same row gives other numbers when it comes again.
    """
    with torch.no_grad():
        return _RowTrial(module, inputs, trial, where, traced, limits).tried()


def is_large(module: nn.Module) -> bool:
    """Whether a module has so many weights that each call takes long."""
    weights = (*module.parameters(), *module.buffers())
    return sum(weight.numel() * weight.element_size() for weight in weights) > _LARGE_BYTES


def _floats(kind: int, noise: Tensor) -> Tensor:
    """Return a row that is large and negative, noise, large and positive, zero, or positive."""
    large = _LARGE * noise.abs()
    return (-large, noise, large, torch.zeros_like(noise), 3 * noise.abs())[kind]


def _is_integer(row: Tensor) -> bool:
    return not (row.is_floating_point() or row.is_complex() or row.dtype is torch.bool)


def _said(shapes: Sequence[torch.Size]) -> str:
    """Return the shapes of the outputs of a row, in words."""
    return "rows of " + " and ".join([str(tuple(shape[1:])) for shape in shapes])


@final
class _RowTrial:
    """One trial. See `try_rows`."""

    def __init__(
        self,
        module: nn.Module,
        inputs: Sequence[ValueSpec],
        trial: TrialRows,
        where: str,
        traced: bool,
        limits: Mapping[int, int],
    ) -> None:
        self._module, self._inputs, self._trial, self._where, self._traced = module, inputs, trial, where, traced
        self._limits = limits
        tables = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
        self._num_tokens = _SMALL if traced else max(tables, default=_SMALL)
        self._sizes = trial.batch_sizes
        weights = [*module.parameters(), *module.buffers()]
        self._is_large = is_large(module)
        self._dtypes = {weight.dtype for weight in weights} | {torch_dtype(spec.dtype) for spec in inputs}
        self._real = trial.batch(inputs, 1)
        self._tolerance = 0.0

    def tried(self) -> Tried:
        """Run the trial."""
        before = torch.get_rng_state()
        first = self._run(self._real)
        is_random = not torch.equal(before, torch.get_rng_state())
        self._tolerance = tolerance({*self._dtypes, *[made.dtype for made in first]})
        if is_random:
            torch.set_rng_state(before)
            self._check_again(first)
            return self._result(self._real, (), first, RANDOM if self._are_alike_without_chance() else CHANCE)
        if not self._trial.independent:
            self._check_again(first)
            return self._result(self._real, (), first)
        rows, alone = self._try_draws(first)
        return self._result(rows, alone, first) if alone else self._result(self._real, (), first, CHAOTIC)

    def _are_alike_without_chance(self) -> bool:
        """Whether rows could be compared with constants in place of what is drawn. RowsError if they differ."""
        if not self._trial.independent:
            return False
        with NoChance():
            try:
                first = self._run(self._real)
            except RAISED_BY_USERS:  # a number that it cannot draw
                return False
            return bool(self._try_draws(first)[1])

    def _try_draws(self, first: Batch) -> tuple[Batch, Batch]:
        """Return rows, and what each gave alone and among others; no outputs if rounding changes them as much.

        first: what the real row gave. RowsError if rows depend on each other.
        """
        earlier: RowsError | None = None
        compared = False
        for seed in range(_DRAWS):
            rows, alone = self._rows(seed, first)
            self._check_again(first)
            same, error = self._compared(rows, alone)
            if error is not None and earlier is not None:
                raise earlier
            if same and earlier is None:
                return rows, alone
            compared, earlier = compared or same, earlier or error
        return (rows, alone) if compared else (rows, ())

    def _result(self, rows: Batch, alone: Batch, first: Batch, *notes: str) -> Tried:
        return Tried(rows, alone, first, self._sizes, self._tolerance, self._run_computed, notes)

    # --- rows ---------------------------------------------------------------------------------------------------

    def _rows(self, seed: int, first: Batch) -> tuple[Batch, Batch]:
        """Return rows, the real one first, and what the module gives for each alone. It raises for none of them."""
        rows, alone = [self._real], [first]
        generator = torch.Generator().manual_seed(seed)
        noise = [torch.randn(real.shape, generator=generator) for real in self._real]
        kinds = [self._candidates(kind, noise, generator) for kind in ((0, 2) if self._is_large else range(5))]
        for candidates in itertools.chain(kinds, () if self._traced else self._of_tokens(generator)):
            for candidate in candidates:
                try:
                    made = self._run(candidate)
                except RAISED_BY_USERS:  # made-up values that the cell does not take
                    continue
                rows.append(candidate)
                alone.append(made)
                break
        shapes = {tuple([made.shape for made in one]) for one in alone}
        if len(shapes) > 1:  # the shape of a row depends on its values: an error when such a request comes
            self._check_shapes(rows, alone)
            same = [k for k, one in enumerate(alone) if [m.shape for m in one] == [m.shape for m in alone[0]]]
            rows, alone = [rows[k] for k in same], [alone[k] for k in same]
        return tuple(map(torch.cat, zip(*rows, strict=True))), tuple(map(torch.cat, zip(*alone, strict=True)))

    def _check_shapes(self, rows: Sequence[Batch], alone: Sequence[Batch]) -> None:
        """RowsError if a row that gives another shape alone than the real one gives the same shape beside it."""
        shapes = [[made.shape for made in one] for one in alone]
        if self._sizes[-1] == 1:
            return
        for row, mine in zip(rows, shapes, strict=True):
            if mine == shapes[0]:
                continue
            try:
                together = self._run(tuple(map(torch.cat, zip(rows[0], row, strict=True))))
            except RAISED_BY_USERS:  # then an engine runs its rows one by one
                continue
            if [made.shape[1:] for made in together] == [shape[1:] for shape in shapes[0]]:
                raise RowsError(
                    f"{self._where}: alone a row gives {_said(mine)}, but {_said(shapes[0])} behind another row that "
                    "gives this alone, so it depends on that. The shape of a row may not depend on values: return rows "
                    "of one shape, such as with a mask, or let it run row by row: bm.Cell(..., independent_rows=False)."
                )

    def _candidates(self, kind: int, noise: list[Tensor], generator: torch.Generator) -> Iterator[Batch]:
        """Yield rows of one kind: all made up, then more and more of the real numbers, changed a little."""
        real = self._real
        made_up = [
            _floats(kind, noise[port]).to(row.dtype)
            if row.is_floating_point()
            else self._integers(kind, port, row, generator)
            for port, row in enumerate(real)
        ]
        yield tuple(made_up)
        near, nearer = (
            [
                (row * (1 + share * (torch.rand(row.shape, generator=generator) - 0.5))).to(row.dtype)
                if row.is_floating_point()
                else row
                for row in real
            ]
            for share in (0.5, 0.01)
        )
        yield tuple([made if row.is_floating_point() else row for made, row in zip(made_up, real, strict=True)])
        for port in range(len(real)):
            yield (*made_up[:port], near[port], *made_up[port + 1 :])
        yield tuple(near)
        yield tuple(nearer)

    def _of_tokens(self, generator: torch.Generator) -> Iterator[list[Batch]]:
        """Yield the real row with other tokens."""
        if not any(map(_is_integer, self._real)):
            return
        parts = 4 if self._is_large else 1
        others = torch.randint(0, self._num_tokens, (_OTHER_TOKENS // parts,), generator=generator).tolist()
        for token in dict.fromkeys((*range(min(_FIRST_TOKENS // parts, self._num_tokens)), *others)):
            yield [tuple([torch.full_like(row, token) if _is_integer(row) else row for row in self._real])]

    def _integers(self, kind: int, port: int, real: Tensor, generator: torch.Generator) -> Tensor:
        """Return a row of small numbers, or of any tokens."""
        if real.dtype is torch.bool:
            return torch.rand(real.shape, generator=generator) < (-1.0, 0.5, 2.0, 0.5, 0.5)[kind]
        limit = self._limits.get(port, self._num_tokens)
        tokens = torch.randint(0, limit, real.shape, generator=generator)
        made = (tokens, torch.ones_like(tokens), tokens, torch.zeros_like(tokens), torch.full_like(tokens, 2))[kind]
        return made.clamp(max=limit - 1).to(real.dtype)

    # --- running ------------------------------------------------------------------------------------------------

    def _run(self, rows: Batch) -> Batch:
        """Return the outputs of rows that run together, in the sizes at which the cell may run."""
        return in_sizes(self._call, rows, self._sizes)

    def _call(self, *rows: Tensor) -> Batch:
        made = flat_outputs(self._module(*[row.clone() for row in rows]), self._where)
        for output in made:
            if output.dim() == 0 or len(output) != len(rows[0]):
                raise ShapeError(f"{self._where}: an output has no row for each")  # it had at other sizes
        return tuple([output.detach() for output in made])

    def _orders(self, count: int) -> Iterator[list[int]]:
        """Yield the batches in which rows are tried together, by number of row: all, in other orders, fewer, many."""
        largest = self._sizes[-1]
        if largest == 1:
            return
        rows = list(range(count))
        yield [*rows[1:], 0][:largest]
        yield [count - 1, 0][:largest]
        if not self._is_large:
            yield rows[:largest]
            yield rows[-1:-4:-1][:largest]
        if not self._traced:  # Python may take another path for many rows
            fitting = _MANY_BYTES // max(1, sum(row.nbytes for row in self._real))
            yield [(5 * k + 1) % count for k in range(min(largest, _MANY, max(fitting, 1)))]
        for begin in range(largest, count, largest - 1):  # each of the others beside the real one
            yield [*rows[begin : begin + largest - 1], 0]

    def _compared(self, rows: Batch, alone: Batch) -> tuple[bool, RowsError | None]:
        """Return whether each row gave the same together as alone, and the error if it is not rounding that did it."""
        same = True
        for order in self._orders(len(rows[0])):
            batch = tuple([row[order] for row in rows])
            try:
                together = self._run(batch)
            except RAISED_BY_USERS:  # then an engine runs its rows one by one
                continue
            for output, (made, wanted) in enumerate(zip(together, alone, strict=True)):
                for place, number in enumerate(order):
                    mine, its = made[place : place + 1], wanted[number : number + 1]
                    if not is_apart(mine, its, self._tolerance):
                        continue
                    one = tuple([values[number : number + 1] for values in rows])
                    rounds = is_rounding(distance(mine, its), partial(self._run_computed, one), output)
                    if not rounds or self._is_mixed(batch, place, one):
                        return False, self._error(output, batch, place, one)
                    same = False
        return same, None

    def _is_mixed(self, batch: Batch, place: int, one: Batch) -> bool:
        """Whether a row depends on the others of a batch, although noise moves its outputs as far."""
        if isinstance(self._module, Opaque):
            return False
        return is_mixed(
            partial(self._run_computed, one),
            self._sizes[0],
            partial(self._run_computed, batch),
            self._sizes[bisect_left(self._sizes, len(batch[0]))],
            place,
            self._tolerance,
        )

    def _run_computed(self, rows: Batch) -> Batch:
        """Run rows that are themselves the results of operations."""
        return self._run(tuple([row * 1 if row.is_floating_point() else row for row in rows]))

    def _check_again(self, first: Batch) -> None:
        """RowsError if the real row gives other numbers now than at first."""
        for output, (made, wanted) in enumerate(zip(self._run(self._real), first, strict=True)):
            if is_apart(made, wanted, self._tolerance):
                raise RowsError(
                    f"{self._where}, {self._output(output)}: the same row gives other numbers when it comes again. A "
                    "cell keeps nothing between calls: state is an input and an output. Its numbers may not depend on "
                    "the time, nor on chance, other than by torch's own random numbers."
                )

    def _error(self, output: int, batch: Batch, place: int, one: Batch) -> RowsError:
        together, alone = partial(self._run, batch), partial(self._run, one)
        num_alone = self._sizes[0]
        num_together = self._sizes[bisect_left(self._sizes, len(batch[0]))]
        cause = ""
        if not isinstance(self._module, Opaque):
            cause = mixing_operation(alone, num_alone, together, num_together, place, self._tolerance)
        return RowsError(
            f"{self._where}, {self._output(output)}: a row gives other numbers among {len(batch[0])} rows than alone"
            f"{f'; the first operation that does is {cause}' if cause else ''}. Rows must not depend on each other: "
            "dimension 0 of every input and output is the batch, and its rows are of different requests. Compute along "
            "the other dimensions, or let it run row by row: bm.Cell(..., independent_rows=False)."
        )

    def _output(self, number: int) -> str:
        module = self._module
        return f"output {module.outputs[number].name!r}" if isinstance(module, Opaque) else f"output {number}"
