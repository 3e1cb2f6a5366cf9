"""The cells of a saved model: programs and ONNX models as files in its directory, written and loaded."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

from torch import Tensor, nn

from batchmaker.compile.binding import BoundCell, traced_whole
from batchmaker.compile.dataflow import CannotRewriteError
from batchmaker.compile.declaration import Declared, agreed, declared_by
from batchmaker.compile.export import flat_module, torch_dtype
from batchmaker.compile.opaque import Opaque
from batchmaker.compile.programs import AnyProgram, EvaluatedProgram, Programs, ReadProgram
from batchmaker.compile.row_trial import TrialRows
from batchmaker.compile.whole_run_trial import WholeRun, prove_same
from batchmaker.errors import BatchmakerError, ModelError, SavedModelError
from batchmaker.graph.spec import CellType, TypeId, ValueSpec
from batchmaker.model.cell import DEFAULT_MAX_SHAPES, Cell
from batchmaker.model.model import Model
from batchmaker.model.onnx_model import OnnxFile, OnnxModel, open_onnx
from batchmaker.model.registry import CellRegistry
from batchmaker.saved import archive
from batchmaker.saved.manifest import (
    MANIFEST,
    Manifest,
    SavedCell,
    SavedFile,
    SavedOnnx,
    SavedProgram,
    SavedSpec,
    SavedWhole,
    read_file,
    write_file,
)

_LOG: Final = logging.getLogger(__name__)


# --- writing --------------------------------------------------------------------------------------------------------


def write_cells(model: Model, directory: Path, registry: CellRegistry) -> tuple[SavedCell, ...]:
    """Write each cell's files, those of one type once, and return their entries for the manifest.

    registry: has bound every cell. Raises SavedModelError.
    """
    writer = _CellWriter(directory, registry)
    return tuple([writer.cell(attribute, cell) for attribute, cell in model.cells.items()])


@final
@dataclass(slots=True)
class _CellWriter:
    """Writes files and records them: programs by cell type, and files by their hash. count: number of names given."""

    directory: Path
    registry: CellRegistry
    programs: dict[TypeId, SavedProgram] = field(default_factory=dict)
    files: dict[str, SavedFile] = field(default_factory=dict)
    count: int = 0

    def cell(self, attribute: str, cell: Cell) -> SavedCell:
        where, types = f"cell {attribute!r}", self.registry.types_of(cell)
        if not types:
            raise SavedModelError(
                f"{where}: the example request never reaches it, so its inputs are not known. "
                "Give example requests that together use every cell, example_requests=[...], or example_chunks if only "
                "unfold_chunk calls it, or remove the cell."
            )
        if cell.memories:
            raise SavedModelError(
                f"{where}: cannot be saved: it reads a memory, and a saved cell is traced with one size of each input. "
                "Save the weights alone: batchmaker.save(model, directory, form='weights')."
            )
        bound = [self.registry.bound[cell_type.type_id] for cell_type in types]
        onnx, first, others = None, None, tuple[SavedProgram, ...]()
        if isinstance(cell.module, Opaque):
            onnx = self._onnx(cell.module, attribute, where)
        else:
            pairs = zip(types, bound, strict=True)
            first, *rest = [self._program(kind.type_id, one, cell, attribute, where) for kind, one in pairs]
            others = tuple(rest)
        state = None if onnx is None or cell.state is None else tuple(map(SavedSpec.of, cell.state))
        return SavedCell(
            attribute=attribute,
            name=cell.name or attribute,
            batch_sizes=cell.batch_sizes,
            priority=cell.priority,
            host_outputs=cell.host_outputs,
            inputs=tuple(map(SavedSpec.of, bound[0].inputs)),
            outputs=tuple(map(SavedSpec.of, bound[0].outputs)),
            graph=None if first is None else first.graph,
            weights=None if first is None else first.weights,
            aliases={} if first is None else first.aliases,
            others=others,
            onnx=onnx,
            state=state,
            max_shapes=cell.max_shapes if onnx is not None and cell.max_shapes != DEFAULT_MAX_SHAPES else None,
            optimize=cell.optimize,
            independent_rows=cell.independent_rows,
            whole=None if cell.whole is None else self._whole(cell, cell.whole, types, attribute, where),
        )

    def _whole(
        self, cell: Cell, whole: nn.Module, types: Sequence[CellType], attribute: str, where: str
    ) -> SavedWhole | None:
        """Return a cell's form for whole runs; None, and a warning, if it cannot be kept."""
        inputs, columns = types[0].inputs, self.registry.num_step_inputs.get(types[0].type_id)
        try:
            if len(types) > 1 or columns is None:
                raise CannotRewriteError(
                    "the examples do not run the cell" if columns is None else "its inputs have several shapes"
                )
            program = whole.exported() if isinstance(whole, EvaluatedProgram) else traced_whole(whole, inputs, columns)
            made = WholeRun(EvaluatedProgram(program), columns)
            trial = TrialRows((), cell.batch_sizes, cell.independent_rows)
            prove_same(flat_module(cell.module_for(inputs)), made, inputs, trial, cell.name or attribute)
            graph = archive.dump_graph(program, where)
            weights = archive.dump_weights(program, where, beside=cell.exported(inputs))
        except (CannotRewriteError, ModelError, SavedModelError) as error:
            _LOG.warning("%s: its form for whole runs is not saved, so its runs will be steps: %s", where, error)
            return None
        stem = self._stem(f"{attribute}_whole")
        return SavedWhole(
            graph=self._file(f"{stem}.pt2", graph),
            weights=self._file(f"{stem}.safetensors", weights.content),
            aliases=weights.aliases,
            shared=weights.shared,
            whole_from=cell.whole_from,
        )

    def _program(self, type_id: TypeId, bound: BoundCell, cell: Cell, attribute: str, where: str) -> SavedProgram:
        if type_id in self.programs:
            return self.programs[type_id]
        try:
            program = cell.exported(bound.inputs)
        except CannotRewriteError as error:
            raise SavedModelError(
                f"{where}: cannot be saved: {error}. A saved cell is traced by torch.export."
            ) from error
        graph = archive.dump_graph(program, where)
        weights = archive.dump_weights(program, where)
        stem = self._stem(attribute)
        made = self.programs[type_id] = SavedProgram(
            inputs=tuple(map(SavedSpec.of, bound.inputs)),
            outputs=tuple(map(SavedSpec.of, bound.outputs)),
            graph=self._file(f"{stem}.pt2", graph),
            weights=self._file(f"{stem}.safetensors", weights.content),
            aliases=weights.aliases,
        )
        return made

    def _onnx(self, module: Opaque, attribute: str, where: str) -> SavedOnnx:
        if not isinstance(module, OnnxModel):
            raise SavedModelError(
                f"{where}: cannot be saved: it is {module.kind}, which is code and no data. Leave the model unsaved "
                "and run it in a batchmaker.Engine of your own program, or write what the cell does as an nn.Module or "
                "an ONNX model."
            )
        try:
            content = module.file.read()
        except ModelError as error:
            raise SavedModelError(f"{where}: cannot be saved: {error}") from error
        names = [tuple([form.name for form in forms]) for forms in (module.inputs, module.outputs)]
        file = self._file(f"{self._stem(attribute)}.onnx", content)
        return SavedOnnx(file=file, inputs=names[0], outputs=names[1], threads=module.threads)

    def _stem(self, attribute: str) -> str:
        """Return a new beginning for the names of a cell's files."""
        stem = re.sub(r"\W", "_", f"{self.count}_{attribute}", flags=re.ASCII).strip("_")
        self.count += 1
        return stem

    def _file(self, name: str, content: bytes) -> SavedFile:
        """Return the file with this content: an existing one, or a new one of this name."""
        file = SavedFile.of(name, content)
        if file.sha256 not in self.files:
            self.files[file.sha256] = write_file(self.directory, name, content)
        return self.files[file.sha256]


# --- loading --------------------------------------------------------------------------------------------------------


def load_cells(path: Path, manifest: Manifest) -> dict[str, Cell]:
    """Return the cells of a saved model by their paths. Raises SavedModelError."""
    reader = _CellReader(path)
    cells: dict[str, Cell] = {}
    for saved in manifest.cells:
        where = f"{path / MANIFEST}: cell {saved.attribute!r}"
        attribute = saved.attribute.partition(".")[0]
        if saved.attribute in cells or not attribute.isidentifier() or attribute.startswith("__"):
            raise SavedModelError(f"{where}: not a new attribute's name. Save the model again.")
        try:
            cells[saved.attribute] = reader.cell(saved, where)
        except SavedModelError:
            raise
        except BatchmakerError as error:
            raise SavedModelError(f"{where}: {error}") from error
    return cells


@final
@dataclass(slots=True)
class _CellReader:
    """Reads files and keeps them by name."""

    path: Path
    programs: dict[tuple[str, str], AnyProgram] = field(default_factory=dict)
    models: dict[SavedOnnx, OnnxModel] = field(default_factory=dict)
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """By the file of weights."""

    def cell(self, saved: SavedCell, where: str) -> Cell:
        programs = saved.programs
        if bool(programs) == (saved.onnx is not None):
            raise SavedModelError(
                f"{where}: needs either a graph with weights, or an ONNX model. Save the model again."
            )
        if saved.onnx is not None:
            module: OnnxModel | Programs = self._onnx(saved.onnx, where)
            most = DEFAULT_MAX_SHAPES if saved.max_shapes is None else saved.max_shapes
        else:
            module, most = Programs(tuple(map(self._program, programs))), len(programs)
        return Cell(
            module,
            batch_sizes=saved.batch_sizes,
            priority=saved.priority,
            host_outputs=saved.host_outputs,
            name=saved.name,
            state=None if saved.state is None else _specs(saved.state),
            max_shapes=most,
            optimize=saved.optimize,
            independent_rows=saved.independent_rows,
            whole=None if saved.whole is None else self._whole(saved, saved.whole),
            whole_from=None if saved.whole is None else saved.whole.whole_from,
        )

    def _whole(self, cell: SavedCell, saved: SavedWhole) -> nn.Module:
        """Return a cell's form for whole runs. The cell's program has been read."""
        tensors = self._weights(saved.weights, saved.aliases)
        own = {} if cell.weights is None else self.tensors.get(cell.weights.name, {})
        for name, source in saved.shared.items():
            if source not in own:
                raise SavedModelError(
                    f"{self.path / saved.weights.name}: no weight {source!r} to share. Save it again."
                )
            tensors[name] = own[source]
        where = str(self.path / saved.graph.name)
        return EvaluatedProgram(archive.load_program(read_file(self.path, saved.graph), tensors, where))

    def _weights(self, file: SavedFile, aliases: dict[str, str]) -> dict[str, Tensor]:
        """Return the tensors of a file by name."""
        return archive.load_weights(read_file(self.path, file), aliases, str(self.path / file.name))

    def _program(self, saved: SavedProgram) -> tuple[Declared, AnyProgram]:
        key = (saved.graph.name, saved.weights.name)
        if key not in self.programs:
            tensors = self.tensors[saved.weights.name] = self._weights(saved.weights, saved.aliases)
            graph = read_file(self.path, saved.graph)
            self.programs[key] = archive.load_program(graph, tensors, str(self.path / saved.graph.name))
        program = self.programs[key]
        declared = Declared(_specs(saved.inputs), _specs(saved.outputs))
        if isinstance(program, ReadProgram):
            return agreed(program.rows, declared), program
        return declared_by(program, declared), program

    def _onnx(self, saved: SavedOnnx, where: str) -> OnnxModel:
        if saved not in self.models:
            content, path = read_file(self.path, saved.file), self.path / saved.file.name
            if saved.threads < 1:
                raise SavedModelError(f"{where}: an ONNX model of {saved.threads} threads. Save the model again.")
            file = OnnxFile(str(path), saved.file.sha256, None, path)
            self.models[saved] = open_onnx(file, content, saved.inputs, saved.outputs, saved.threads)
        return self.models[saved]


def _specs(saved: tuple[SavedSpec, ...]) -> tuple[ValueSpec, ...]:
    specs = tuple([spec.value_spec() for spec in saved])
    for spec in specs:
        torch_dtype(spec.dtype)
    return specs
