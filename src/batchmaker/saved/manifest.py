"""manifest.json: the parts of a saved model; reads and checks its files."""

from __future__ import annotations

import hashlib
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


class SavedOnnx(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cell's ONNX model. inputs, outputs: names, in the order of the cell. See batchmaker.onnx."""

    file: SavedFile
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    threads: int


class SavedCell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One cell. attribute: its path in the model.

    inputs, outputs, graph, weights, aliases: its program, see SavedProgram. others: programs for other shapes of its
    inputs. onnx: its ONNX model, instead of programs. state, max_shapes, optimize, independent_rows: see Cell. Fields
    with a default are omitted if they are not used, as in older versions.
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


class _Version(msgspec.Struct):
    format: int
    batchmaker: str = "an unknown version"


def read_manifest(directory: Path) -> Manifest:
    """Return the directory's manifest. SavedModelError if it is malformed or of another format."""
    path = directory / MANIFEST
    advice = "it is not a saved model; write one with batchmaker.save(model, directory)"
    size = _size(path, advice)
    if size > _MAX_MANIFEST_BYTES:
        raise SavedModelError(f"{path}: {size} bytes are more than a manifest may have ({_MAX_MANIFEST_BYTES})")
    raw = _read(path, advice)
    try:
        version = msgspec.json.decode(raw, type=_Version)
        if version.format != FORMAT:
            raise SavedModelError(
                f"{path}: written by batchmaker {version.batchmaker} in format {version.format}, this one reads format "
                f"{FORMAT}. Use that version of batchmaker, or save the model again."
            )
        return msgspec.json.decode(raw, type=Manifest)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise SavedModelError(f"{path}: malformed: {error}. Save the model again.") from None


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
        found = path.stat()
    except OSError as error:
        raise _unreadable(path, error, advice) from None
    if not stat.S_ISREG(found.st_mode):
        raise SavedModelError(f"{path}: is no regular file, and only such are read: {advice}")
    return found.st_size


def _read(path: Path, advice: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error, advice) from None


def _unreadable(path: Path, error: OSError, advice: str) -> SavedModelError:
    return SavedModelError(f"{path}: cannot be read ({error.strerror or error}): {advice}")
