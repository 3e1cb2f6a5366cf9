"""One cell's graph as a `torch.export` archive without weights and without pickles, and its weights as safetensors."""

from __future__ import annotations

import inspect
import io
import json
import logging
import sys
import warnings
import zipfile
from dataclasses import dataclass
from typing import Any, Final, final

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from batchmaker.compile.programs import AnyProgram
from batchmaker.compile.tracing_thread import in_tracing_thread
from batchmaker.errors import SavedModelError
from batchmaker.saved.graph_check import RefusedGraphError, check_calls, check_graph
from batchmaker.saved.graph_reader import UnknownGraphError, read_graph

_MEMBERS: Final = ("archive_format", "archive_version", "byteorder", "models/model.json")
_MAX_GRAPH_BYTES: Final = 64 << 20
_WEIGHT, _CONSTANT = "state_dict.", "constants."
_LEFT_OUT: Final = ("serialize_state_dict", "serialize_constants", "serialize_example_inputs")
"""Parts of an artifact that are not written here. torch 2.11 cannot leave them out, so they are made and dropped."""
_LOG: Final = logging.getLogger(__name__)


def dump_graph(program: ExportedProgram, where: str) -> bytes:
    """Return the program as a .pt2 archive in torch's layout: only its graph.

    SavedModelError if it cannot be serialised.
    """
    from torch._export.serde import serialize  # this import is large, so it is made only for saving

    try:
        parameters = inspect.signature(serialize.serialize).parameters
        left_out: dict[str, Any] = {part: False for part in _LEFT_OUT if part in parameters}
        artifact = serialize.serialize(program, **left_out)
        graph = json.loads(artifact.exported_program)
        _strip(graph)
        check_graph(graph)
    except RefusedGraphError as error:
        raise SavedModelError(f"{where}: cannot be saved: its graph has {error}") from None
    except Exception as error:  # torch's serialiser may raise anything
        raise SavedModelError(f"{where}: cannot be saved: {type(error).__name__}: {error}") from error
    contents = (b"pt2", b"0", sys.byteorder.encode(), json.dumps(graph).encode())
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for member, content in zip(_MEMBERS, contents, strict=True):
            archive.writestr(zipfile.ZipInfo(f"cell/{member}"), content)  # no date: equal cells give equal bytes
    return stream.getvalue()


def _strip(graph: dict[str, Any]) -> None:
    """Remove parts that are not needed to run the graph: traces, guards, the calls of inner modules."""
    graph["guards_code"] = []
    module = graph["graph_module"]
    module["metadata"], module["treespec_namedtuple_fields"] = {}, {}
    module["module_call_graph"] = module["module_call_graph"][:1]
    for node in module["graph"]["nodes"]:
        node["metadata"] = {}


@final
@dataclass(frozen=True, slots=True)
class DumpedWeights:
    """Weights and constants as safetensors, each tensor once; and the names of those left out, with the names of others
    that they are: of the same file, or of the one beside it."""

    content: bytes
    aliases: dict[str, str]
    shared: dict[str, str]


def _tensors(program: ExportedProgram) -> list[tuple[str, Any]]:
    weights = [(_WEIGHT + name, value) for name, value in program.state_dict.items()]
    return weights + [(_CONSTANT + name, value) for name, value in program.constants.items()]


def _key(tensor: Tensor) -> tuple[Any, ...]:
    """Return what is equal for tensors that are the same memory."""
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def dump_weights(program: ExportedProgram, where: str, beside: ExportedProgram | None = None) -> DumpedWeights:
    """Return the weights of a program. beside: one whose weights are kept in another file."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    shared: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    others = {} if beside is None else {_key(value): name for name, value in _tensors(beside) if _is_held(value)}
    for name, value in _tensors(program):
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            raise SavedModelError(f"{where}: {name} is a {type(value).__name__}; only dense tensors can be saved")
        tensor = value.detach()
        key = _key(tensor)
        if tensor.numel() and key in others:
            shared[name] = others[key]
            continue
        if tensor.numel() and key in seen:
            aliases[name] = seen[key]
            continue
        seen[key] = name
        tensors[name] = tensor.cpu().contiguous().clone()
    return DumpedWeights(safetensors.torch.save(tensors), aliases, shared)


def _is_held(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > 0


def load_weights(content: bytes, aliases: dict[str, str], where: str) -> dict[str, Tensor]:
    """Return the tensors by name, aliases included."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tensors = dict(safetensors.torch.load(content))
        tensors.update({name: tensors[source] for name, source in aliases.items()})
    except Exception as error:  # besides SafetensorError a bad header can raise nearly anything
        raise SavedModelError(f"{where}: cannot be read ({type(error).__name__}: {error}). Save it again.") from None
    return tensors


def load_program(archive: bytes, tensors: dict[str, Tensor], where: str) -> AnyProgram:
    """Return the program with these weights. SavedModelError if the archive holds more than a harmless graph.

    It is a ReadProgram, which needs nothing of torch.export, wherever `graph_reader` knows all that is in it.
    """
    try:
        raw = json.loads(_graph_json(archive, where))
        check_graph(raw)
        weights, constants = _named(tensors, _WEIGHT), _named(tensors, _CONSTANT)
        try:
            return read_graph(raw, weights, constants, lambda: _by_torch(raw, weights, constants))
        except UnknownGraphError as error:
            _LOG.debug("%s: read by torch.export: %s", where, error)
        return _by_torch(raw, weights, constants)
    except SavedModelError:
        raise
    except RefusedGraphError as error:
        raise SavedModelError(f"{where}: refused, its graph has {error}. Do not trust where it comes from.") from None
    except Exception as error:  # a malformed graph may raise anything
        raise SavedModelError(f"{where}: malformed graph ({type(error).__name__}: {error}). Save it again.") from error


def _named(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors of one kind by their names in the module."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _by_torch(raw: Any, weights: dict[str, Tensor], constants: dict[str, Tensor]) -> ExportedProgram:
    """Return the program of checked JSON as torch's own reader makes it, checked again."""
    from torch._export.serde import schema, serialize  # see dump_graph

    held = dict(weights)
    for spec in raw["graph_module"]["signature"]["input_specs"]:
        name = spec.get("parameter", {}).get("parameter_name")
        if name in held:
            held[name] = nn.Parameter(held[name], requires_grad=False)
    parsed = serialize._dict_to_dataclass(schema.ExportedProgram, raw)  # type: ignore[no-untyped-call]
    reader = serialize.ExportedProgramDeserializer()
    program: ExportedProgram = in_tracing_thread(reader.deserialize, parsed, held, dict(constants))
    check_calls(program.graph)
    _check_weights(program)
    return program


def _graph_json(content: bytes, where: str) -> bytes:
    """Return the graph of an archive that has exactly the members written by `dump_graph`."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
            names = [entry.filename.partition("/")[2] for entry in entries]
            extra = sorted(set(names) - set(_MEMBERS))
            if extra:
                raise SavedModelError(
                    f"{where}: refused: it holds {extra[0]!r}, which a saved cell does not have and which may be a "
                    "pickle. Archives of torch.export.save are not accepted; write the model with batchmaker.save."
                )
            if sorted(names) != sorted(_MEMBERS):
                raise SavedModelError(f"{where}: malformed: it holds {', '.join(names)}. Save the model again.")
            if any(entry.file_size > _MAX_GRAPH_BYTES for entry in entries):
                raise SavedModelError(f"{where}: refused: its graph is larger than {_MAX_GRAPH_BYTES} bytes")
            members = {name: archive.read(entry) for name, entry in zip(names, entries, strict=True)}
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise SavedModelError(f"{where}: not an archive ({error}). Save the model again.") from None
    if (members["archive_format"], members["archive_version"]) != (b"pt2", b"0"):
        raise SavedModelError(f"{where}: archive version {members['archive_version']!r}; this torch reads b'0'")
    return members["models/model.json"]


def _check_weights(program: ExportedProgram) -> None:
    """Check that every tensor of the graph exists, with the expected shape and dtype."""
    placeholders = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            continue
        wanted, name = placeholders[spec.arg.name], str(spec.target)
        in_weights = spec.kind is InputKind.PARAMETER or (spec.kind is InputKind.BUFFER and bool(spec.persistent))
        held = program.state_dict if in_weights else program.constants
        got = held.get(name)
        if not isinstance(got, Tensor):
            raise RefusedGraphError(f"no tensor for {name!r} among its weights")
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            raise RefusedGraphError(
                f"weight {name!r} of {got.dtype}{list(got.shape)}, made for {wanted.dtype}{wanted.shape}"
            )
