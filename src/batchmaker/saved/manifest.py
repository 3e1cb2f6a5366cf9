"""manifest.json: the parts of a saved model; reads and checks its files."""

from __future__ import annotations

import hashlib
import math
import os
import re
import stat
from pathlib import Path
from typing import Any, Final

import msgspec

from batchmaker.errors import SavedModelError
from batchmaker.graph.spec import ValueSpec

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)
_MAX_MANIFEST_BYTES = 256 << 20


class SavedSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ValueSpec."""

    shape: tuple[int, ...]
    dtype: str
    num_tokens: int | None

    @staticmethod
    def of(spec: ValueSpec) -> SavedSpec:
        return SavedSpec(spec.shape, spec.dtype, spec.num_tokens)

    def value_spec(self) -> ValueSpec:
        return ValueSpec(self.shape, self.dtype, self.num_tokens)


class SavedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file in the directory. sha256: of its bytes, in hexadecimal. num_bytes: None in models of older versions."""

    name: str
    sha256: str
    num_bytes: int | None = None

    @staticmethod
    def of(name: str, content: bytes) -> SavedFile:
        return SavedFile(name, hashlib.sha256(content).hexdigest(), len(content))


class SavedProgram(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cell's program for one shape of its inputs. Programs of one cell type name the same two files.

    aliases: weights that are the same tensor as another one, with the name of the other.
    """

    inputs: tuple[SavedSpec, ...]
    outputs: tuple[SavedSpec, ...]
    graph: SavedFile
    weights: SavedFile
    aliases: dict[str, str]


class SavedWhole(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cell's form for whole runs, with its `whole_from`.

    aliases: as of SavedProgram. shared: weights that are the cell's own, with their names among those of its program.
    """

    graph: SavedFile
    weights: SavedFile
    aliases: dict[str, str]
    shared: dict[str, str]
    whole_from: int | None = None


class SavedOnnx(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cell's ONNX model. inputs, outputs: names, in the order of the cell. See batchmaker.onnx."""

    file: SavedFile
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    threads: int


class SavedCell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One cell. attribute: its path in the model.

    inputs, outputs, graph, weights, aliases: its program, see SavedProgram. others: programs for other shapes of its
    inputs. onnx: its ONNX model, instead of programs. state, max_shapes, optimize, independent_rows: see Cell. whole:
    its form for whole runs. Fields with a default are omitted if they are not used, as in older versions.
    """

    attribute: str
    name: str
    batch_sizes: tuple[int, ...]
    priority: int
    host_outputs: tuple[int, ...]
    inputs: tuple[SavedSpec, ...]
    outputs: tuple[SavedSpec, ...]
    graph: SavedFile | None = None
    weights: SavedFile | None = None
    aliases: dict[str, str] = {}
    others: tuple[SavedProgram, ...] = ()
    onnx: SavedOnnx | None = None
    state: tuple[SavedSpec, ...] | None = None
    max_shapes: int | None = None
    optimize: bool = False
    independent_rows: bool = True
    whole: SavedWhole | None = None

    @property
    def programs(self) -> tuple[SavedProgram, ...]:
        """Its programs, the first one first; none without a graph or weights."""
        if self.graph is None or self.weights is None:
            return ()
        first = SavedProgram(
            inputs=self.inputs, outputs=self.outputs, graph=self.graph, weights=self.weights, aliases=self.aliases
        )
        return (first, *self.others)


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole saved model.

    model: "package.module:Class". state, example_request: see saved.plain. deadline_ms, example_chunks: see Model.
    example_requests: those after the first.
    """

    format: int
    batchmaker: str
    torch: str
    model: str
    state: dict[str, Any]
    cells: tuple[SavedCell, ...]
    example_request: Any
    deadline_ms: float | None = None
    example_requests: tuple[Any, ...] = ()
    example_chunks: tuple[Any, ...] = ()


# --- limits ---------------------------------------------------------------------------------------------------------

MAX_CELLS: Final = 1024
MAX_PROGRAMS: Final = 256
"""Of one cell."""
MAX_VALUES: Final = 256
"""Inputs or outputs of one cell."""
MAX_ROW_ELEMENTS: Final = 1 << 26
"""Of one value of one node."""
MAX_BATCH: Final = 1 << 14
MAX_BATCH_SIZES: Final = 512
MAX_BATCH_ELEMENTS: Final = 1 << 31
"""Of one value in the largest batch, which is computed when a model starts."""
MAX_EXAMPLES: Final = 256
MAX_EXAMPLE_VALUES: Final = 1 << 20
"""Numbers, strings and lists in all examples together."""
MAX_LEVELS: Final = 64
"""Of lists and dicts inside each other, in the state and in examples."""
_MAX_NAME: Final = 256
_MAX_THREADS: Final = 1024
_MAX_PRIORITY: Final = 1 << 31


def check_limits(manifest: Manifest, where: str) -> None:
    """SavedModelError unless everything in the manifest is as small as what a start can compute in bounded time.

    It holds for a model that is saved too, so that what is saved can be loaded.
    """
    _at_most(len(manifest.cells), MAX_CELLS, f"{where}: cells")
    for cell in manifest.cells:
        _check_cell(cell, f"{where}: cell {cell.attribute[:_MAX_NAME]!r}")
    examples = (manifest.example_request, *manifest.example_requests, *manifest.example_chunks)
    _at_most(len(examples), MAX_EXAMPLES, f"{where}: example requests and chunks")
    count = 0
    for example in examples:
        count += _num_values(example, f"{where}: an example request")
        _at_most(count, MAX_EXAMPLE_VALUES, f"{where}: values in the example requests")
    _num_values(manifest.state, f"{where}: the state")
    if manifest.deadline_ms is not None and not manifest.deadline_ms > 0:
        raise SavedModelError(f"{where}: deadline_ms is {manifest.deadline_ms}, it must be above 0")


def _check_cell(cell: SavedCell, where: str) -> None:
    for text in (cell.attribute, cell.name):
        _at_most(len(text), _MAX_NAME, f"{where}: letters of its name")
    _at_most(abs(cell.priority), _MAX_PRIORITY, f"{where}: priority")
    _at_most(len(cell.batch_sizes), MAX_BATCH_SIZES, f"{where}: batch_sizes")
    largest = max(cell.batch_sizes, default=0)
    _at_most(largest, MAX_BATCH, f"{where}: rows in its largest batch")
    _at_most(len(cell.others) + 1, MAX_PROGRAMS, f"{where}: programs")
    _at_most(cell.max_shapes or 0, MAX_PROGRAMS, f"{where}: max_shapes")
    _at_most(0 if cell.onnx is None else cell.onnx.threads, _MAX_THREADS, f"{where}: threads")
    for specs in (cell.inputs, cell.outputs, cell.state or (), *((p.inputs, p.outputs) for p in cell.others)):
        _check_specs(specs, largest, where)


def _check_specs(specs: Any, largest: int, where: str) -> None:
    _at_most(len(specs), MAX_VALUES, f"{where}: inputs or outputs")
    for spec in specs:
        if not isinstance(spec, SavedSpec):
            _check_specs(spec, largest, where)
            continue
        _at_most(len(spec.shape), MAX_LEVELS, f"{where}: dimensions of a value")
        if min(spec.shape, default=0) < 0 or (spec.num_tokens is not None and spec.num_tokens < 1):
            raise SavedModelError(f"{where}: a value of shape {list(spec.shape)} and {spec.num_tokens} tokens")
        elements = math.prod(spec.shape)
        _at_most(elements, MAX_ROW_ELEMENTS, f"{where}: elements of one value")
        _at_most(elements * largest, MAX_BATCH_ELEMENTS, f"{where}: elements of one value in its largest batch")


def _num_values(value: Any, where: str) -> int:
    """Return how many values there are in JSON, without recursion. SavedModelError if it is nested too deeply."""
    count, level = 0, [value]
    for _ in range(MAX_LEVELS):
        count += len(level)
        lists = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [inner for one in lists for inner in one]
        if not level:
            return count
    raise SavedModelError(f"{where} has more than {MAX_LEVELS} levels of lists and dicts. Keep flatter data.")


def _at_most(count: int, most: int, what: str) -> None:
    if count > most:
        raise SavedModelError(f"{what}: {count} are more than a saved model may have ({most})")


# --- reading and writing --------------------------------------------------------------------------------------------


class _Version(msgspec.Struct):
    format: int
    batchmaker: str = "an unknown version"


def read_manifest(directory: Path) -> Manifest:
    """Return the directory's manifest. SavedModelError if it is malformed or of another format."""
    path = directory / MANIFEST
    raw = read_bytes(path, "it is not a saved model; write one with batchmaker.save(model, directory)")
    try:
        version = msgspec.json.decode(raw, type=_Version)
        if version.format != FORMAT:
            raise SavedModelError(
                f"{path}: written by batchmaker {version.batchmaker} in format {version.format}, this one reads format "
                f"{FORMAT}. Use that version of batchmaker, or save the model again."
            )
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise SavedModelError(f"{path}: malformed: {error}. Save the model again.") from None
    check_limits(manifest, str(path))
    return manifest


def read_bytes(path: Path, advice: str) -> bytes:
    """Return the content of a file of JSON. SavedModelError, with the advice, if it cannot be read or is too large."""
    size = _size(path, advice)
    if size > _MAX_MANIFEST_BYTES:
        raise SavedModelError(f"{path}: {size} bytes are more than a manifest may have ({_MAX_MANIFEST_BYTES})")
    return _read(path, advice)


def read_file(directory: Path, file: SavedFile) -> bytes:
    """Return the content of a file in the directory after checking its hash against the manifest."""
    if not _FILE_NAME.fullmatch(file.name):
        raise SavedModelError(
            f"{directory / MANIFEST}: file name {file.name!r} is refused: it must be a plain name in the same directory"
        )
    path = directory / file.name
    advice = "the saved model is incomplete; copy the whole directory again"
    size = _size(path, advice)
    if file.num_bytes not in (None, size):
        raise SavedModelError(f"{path}: has {size} bytes, {MANIFEST} says {file.num_bytes}: {advice}")
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory_bytes:  # a file may say that it has more than the disk
        raise SavedModelError(f"{path}: has {size} bytes, this machine's memory only {memory_bytes}")
    content = _read(path, advice)
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise SavedModelError(
            f"{path}: its SHA-256 is not the one in {MANIFEST}: the file is truncated or was changed. "
            "Copy the whole directory again, or save the model again."
        )
    return content


def write_file(directory: Path, name: str, content: bytes) -> SavedFile:
    """Write a new file and return its entry for the manifest."""
    (directory / name).write_bytes(content)
    return SavedFile.of(name, content)


def _size(path: Path, advice: str) -> int:
    """Return a file's size before reading it. Pipes and devices, which may never end, are refused."""
    try:
        status = path.stat()
    except OSError as error:
        raise _unreadable(path, error, advice) from None
    if not stat.S_ISREG(status.st_mode):
        raise SavedModelError(f"{path}: is no regular file, and only such are read: {advice}")
    return status.st_size


def _read(path: Path, advice: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error, advice) from None
    except MemoryError:
        raise SavedModelError(f"{path}: does not fit into this machine's memory") from None


def _unreadable(path: Path, error: OSError, advice: str) -> SavedModelError:
    return SavedModelError(f"{path}: cannot be read ({error.strerror or error}): {advice}")
