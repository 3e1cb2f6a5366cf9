"""Declarations of a cell when it is made, and checks of its module."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from batchmaker.compile.export import spec_of_rows
from batchmaker.errors import ModelError, OptionError, ShapeError
from batchmaker.graph.spec import ValueSpec


@final
@dataclass(frozen=True, slots=True)
class Declared:
    """Row specs of a cell that are known before its use, as for a traced program."""

    inputs: tuple[ValueSpec, ...]
    outputs: tuple[ValueSpec, ...]


def uncompiled(module: Any) -> Any:
    """Return the original module of a torch.compile result: the engine compiles it itself when it is bound."""
    return module._orig_mod if type(module).__name__ == "OptimizedModule" else module


def checked_module(module: Any) -> nn.Module:
    """Return a module that can be a cell. For any other object raise ModelError, which says what to write instead."""
    module = uncompiled(module)
    kind = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
    if not isinstance(module, nn.Module):
        raise ModelError(f"bm.Cell wraps a torch.nn.Module, got {what_came(module, 'bm.Cell')}")
    if isinstance(module, nn.RNNBase):
        raise ModelError(
            f"bm.Cell wraps one step, and nn.{kind} runs over a whole sequence with a batch. Write "
            f"bm.recurrent(nn.{kind}(...)), and call it in unfold as torch does: output, state = self.{kind.lower()}(x)"
        )
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        each = (
            "{name: bm.Cell(m) for name, m in modules.items()}"
            if isinstance(module, nn.ModuleDict)
            else ("[bm.Cell(m) for m in modules]")
        )
        raise ModelError(f"bm.Cell wraps one module, and an nn.{kind} has no forward(). Make a cell of each: {each}")
    return module


def what_came(argument: Any, call: str) -> str:
    """Return a description of the object given instead of a module, and the line to write instead, if known."""
    kind = f"the class {argument.__name__}" if isinstance(argument, type) else type(argument).__name__
    package = type(argument).__module__.partition(".")[0]
    if isinstance(argument, str | os.PathLike) and str(argument).lower().endswith(".onnx"):
        return f"{kind}. Write {call}(bm.onnx({str(argument)!r}))"
    if package == "onnx":
        return f"{kind}. Write {call}(bm.onnx(model.SerializeToString()))"
    if package == "onnxruntime":
        return f"{kind}. Give the file that it was made of: {call}(bm.onnx('model.onnx'))"
    if isinstance(argument, str | os.PathLike):
        return f"{kind}; read the file into a torch.nn.Module first"
    if callable(argument) and not isinstance(argument, type):
        return f"{kind}. Write {call}(bm.opaque(function, inputs=..., outputs=...)) for a function over arrays"
    return kind


def state_specs(state: Iterable[int | tuple[int, ...] | ValueSpec], dtype: str) -> tuple[ValueSpec, ...]:
    """Return the specs of a declared state. OptionError for something that is not a shape."""
    specs = []
    for part in state if isinstance(state, Iterable) else (state,):
        shape = (part,) if isinstance(part, int) else part.shape if isinstance(part, ValueSpec) else part
        if not isinstance(shape, tuple | list) or not all(type(size) is int and size > 0 for size in shape):
            raise OptionError(
                "state must be the shapes of its parts without the batch, such as (64, 128, 128) or ((2, 64), 128), "
                f"got {part!r}"
            )
        specs.append(part if isinstance(part, ValueSpec) else ValueSpec(tuple(shape), dtype))
    return tuple(specs)


def declared_by(program: torch.export.ExportedProgram, declared: Declared | None) -> Declared:
    """Return the row specs of a program's inputs and outputs. ShapeError if they differ from the declaration."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    signature = program.graph_signature
    sides = []
    for names in (signature.user_inputs, signature.user_outputs):
        tensors = [values.get(str(name)) for name in names]
        if not all(isinstance(tensor, torch.Tensor) and tensor.dim() for tensor in tensors):
            raise ModelError("a program that is a cell takes and gives batches of rows only")
        sides.append(tuple(spec_of_rows(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)))
    rows = Declared(*sides)
    return rows if declared is None else agreed(rows, declared)


def agreed(actual: Declared, declared: Declared) -> Declared:
    """Return what was declared of a program; ShapeError if its rows are others."""
    for kind, had, want in (("inputs", actual.inputs, declared.inputs), ("outputs", actual.outputs, declared.outputs)):
        if [spec.row_signature for spec in had] != [spec.row_signature for spec in want]:
            raise ShapeError(
                f"the graph's {kind} are ({', '.join(map(str, had))}), declared as ({', '.join(map(str, want))})"
            )
    return declared
