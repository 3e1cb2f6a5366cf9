"""ONNX models as modules, run by ONNX Runtime (extra `onnx`)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from batchmaker.compile.export import said_first
from batchmaker.compile.opaque import Array, Opaque, RowForm
from batchmaker.errors import ModelError, OptionError, needing, unknown_name

_DTYPES: Final = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    **{f"tensor({name})": name for name in ("int64", "int32", "int16", "int8", "uint8", "bool")},
}
"""The dtype of each ONNX Runtime type that rows can have."""

_DYNAMIC: Final = (
    "Export it with dimension 0 of every input and output dynamic, such as torch.onnx.export(module, rows, "
    "'model.onnx', dynamic_shapes={{{name!r}: {{0: torch.export.Dim('batch')}}, ...}}). State comes as [batch, ...] "
    "too: transpose a recurrent layer's [layers, batch, width] inside the module."
)


@final
@dataclass(frozen=True, slots=True)
class OnnxFile:
    """The bytes of a model: in memory, or in a file, which must not change. sha256: their hash, in hexadecimal."""

    where: str
    sha256: str
    content: bytes | None
    path: Path | None = None

    def read(self) -> bytes:
        """Return the bytes. ModelError if the file is gone or has changed."""
        if self.content is not None:
            return self.content
        assert self.path is not None
        content = _read(self.path)
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise ModelError(f"{self.where}: has changed since the cell was made. Make it again with bm.onnx.")
        return content


@final
class OnnxModel(Opaque):
    """An ONNX model as a module. See `onnx`. file: the bytes. threads: compute threads of one call."""

    def __init__(
        self, file: OnnxFile, session: Any, inputs: tuple[RowForm, ...], outputs: tuple[RowForm, ...], threads: int
    ) -> None:
        super().__init__(inputs, outputs)
        self.file, self.threads = file, threads
        self._session = session
        self._input_names = [form.name for form in inputs]
        self._output_names = [form.name for form in outputs]

    @property
    def kind(self) -> str:
        return "an ONNX model"

    @property
    def identity(self) -> str:
        """The bytes and the chosen inputs and outputs: the same file in two cells is one cell type."""
        return f"onnx {self.file.sha256} {self._input_names} {self._output_names} {self.threads}"

    def compute(self, rows: list[Array]) -> Sequence[Array]:
        made: Sequence[Array] = self._session.run(self._output_names, dict(zip(self._input_names, rows, strict=True)))
        return made


def onnx(
    model: str | os.PathLike[str] | bytes,
    *,
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    threads: int = 1,
) -> OnnxModel:
    """Return an ONNX model as a module, for `Cell` or `layers`. ONNX Runtime computes it, on the CPU.

    - model: a file, or its bytes. Dimension 0 of all inputs and outputs is the batch and must be dynamic in the file.
      Names, dtypes and the shapes of rows are those of the file. Other dimensions may be dynamic too: then a cell has
      one type for each shape in the requests, as with any module.
    - inputs: all names in the cell's order (state last), if the file has another order.
    - outputs: names of the outputs to compute, in order; by default all.
    - threads: compute threads of each call.

    Weights in separate files beside the model are joined with it. A saved model keeps the bytes; nothing in them runs
    as code. Raises ModelError for anything that is no such model, and without onnxruntime; OptionError for an unknown
    name.
    """
    if isinstance(model, bytes):
        where, content, path = "the ONNX model", model, None
    elif isinstance(model, str | os.PathLike):
        where, path = str(model), Path(model).absolute()
        content = _read(path)
    else:
        raise ModelError(
            f"bm.onnx takes the path of an .onnx file, or its bytes, got {type(model).__name__}; "
            "bm.onnx(model.SerializeToString()) where it is an onnx.ModelProto"
        )
    if threads < 1:
        raise OptionError(f"threads must be at least 1, got {threads}")
    try:
        return open_onnx(_file(where, path, content), content, inputs, outputs, threads)
    except _OtherFilesError:
        if path is None:
            raise
    content = _joined(path)
    return open_onnx(_file(where, None, content), content, inputs, outputs, threads)


def open_onnx(
    file: OnnxFile, content: bytes, inputs: Sequence[str] | None, outputs: Sequence[str] | None, threads: int
) -> OnnxModel:
    """Return the model of a file whose bytes are given. As `onnx` otherwise; the bytes may not name other files."""
    session = _session(file, content, threads)
    takes = _chosen("input", [_form(arg, "input", file.where) for arg in session.get_inputs()], inputs)
    made = _chosen("output", [_form(arg, "output", file.where) for arg in session.get_outputs()], outputs)
    if not takes:
        raise ModelError(f"{file.where}: takes no inputs, expected at least one. Its dimension 0 is the batch.")
    missing = {arg.name for arg in session.get_inputs()} - {form.name for form in takes}
    if missing:
        names = ", ".join(sorted(missing))
        raise OptionError(f"{file.where}: inputs leaves out {names}; name all of them, in any order")
    return OnnxModel(file, session, takes, made, threads)


def _file(where: str, path: Path | None, content: bytes) -> OnnxFile:
    return OnnxFile(where, hashlib.sha256(content).hexdigest(), content if path is None else None, path)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(
            f"{path}: cannot be read ({error.strerror or error}); give the path of an .onnx file"
        ) from None


def _joined(path: Path) -> bytes:
    """Return a model and its separate weight files as one model. ModelError if they cannot be joined."""
    with needing("onnx", f"{path}: a model with its weights in other files", ModelError):
        import onnx
    try:
        content: bytes = onnx.load(path).SerializeToString()
    except Exception as error:  # errors of onnx, of protobuf, and of the files
        raise ModelError(
            f"{path}: keeps its weights in other files, which cannot be joined with it ({said_first(error)}). All "
            "must be in one folder; or export it as one file: torch.onnx.export(..., external_data=False)"
        ) from error
    return content


def _session(file: OnnxFile, content: bytes, threads: int) -> Any:
    with needing("onnx", f"{file.where}: an ONNX model", ModelError):
        import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4  # errors are raised; nothing else is printed
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", os.devnull)
    try:
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime has a class of its own for each status
        raise _refused(file.where, error) from error


class _OtherFilesError(ModelError):
    """A model names other files for its weights."""


def _refused(where: str, error: Exception) -> ModelError:
    said = said_first(error)
    if type(error).__name__ == "InvalidProtobuf":
        return ModelError(f"{where}: is not an ONNX file ({said})")
    if "External data" in said or os.devnull in said:  # nothing else is looked up there
        return _OtherFilesError(f"{where}: names other files for its weights, which are not read ({said})")
    return ModelError(f"{where}: ONNX Runtime cannot load it ({said})")


def _form(arg: Any, kind: str, where: str) -> RowForm:
    """Return the form of an input or output. ModelError if its rows cannot be batched."""
    dtype = _DTYPES.get(arg.type)
    at = f"{where}: {kind} {arg.name!r}"
    if dtype is None:
        raise ModelError(f"{at} is of type {arg.type}; a cell takes and gives {', '.join(sorted(_DTYPES))}")
    return RowForm(arg.name, _row_shape(arg, kind, at), dtype)


def _row_shape(arg: Any, kind: str, at: str) -> tuple[int | None, ...] | None:
    if not arg.shape and kind == "output":
        return None  # a single number, or unknown before first use
    if not arg.shape:
        raise ModelError(f"{at} has no dimensions, so there is no batch. " + _DYNAMIC.format(name=arg.name))
    if isinstance(arg.shape[0], int):
        raise ModelError(
            f"{at} has a fixed batch of {arg.shape[0]} (shape {arg.shape}). " + _DYNAMIC.format(name=arg.name)
        )
    return tuple([size if isinstance(size, int) else None for size in arg.shape[1:]])


def _chosen(kind: str, forms: list[RowForm], names: Sequence[str] | None) -> tuple[RowForm, ...]:
    """Return the forms of these names, in their order; all of them without names."""
    if names is None:
        return tuple(forms)
    by_name = {form.name: form for form in forms}
    for name in names:
        if name not in by_name:
            raise unknown_name(f"{kind} of the ONNX model", name, by_name)
    if not names or len(set(names)) < len(names):
        raise OptionError(f"{kind}s must name each {kind} once, and at least one; got {list(names)}")
    return tuple(by_name[name] for name in names)
