"""A static network, layer by layer: a model whose cells are the layers of a module."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from batchmaker.compile.declaration import uncompiled, what_came
from batchmaker.compile.opaque import Opaque, float_dtype_of
from batchmaker.errors import InvalidRequestError, ModelError, OptionError, unknown_name
from batchmaker.graph.spec import ValueSpec
from batchmaker.model.batch_sizes import size_ladder
from batchmaker.model.cell import Cell
from batchmaker.model.cuts import Cut, Place, cut, has_weights, run_layers
from batchmaker.model.host_values import host_value
from batchmaker.model.model import Model
from batchmaker.model.network_graph import Traced, input_names, normalised_sizes, trace_modules, trace_operators
from batchmaker.model.stand_ins import StandIn
from batchmaker.model.whole_network import by_position, whole, whole_opaque

DEFAULT_MAX_BATCH: Final = 64
CUTS: Final = ("layers", "blocks", "whole")

CutAt = str | Sequence[str | type[nn.Module]]
"""Where a network is cut: one of CUTS, or submodules by dotted name or by class."""


class Layered(Model):
    """A static network whose layers are cells. Made by `layers`; a subclass may give requests another form.

    A request is one row: a tensor, or a tuple or dict of tensors if the module takes several. See `layers` for the
    options. open_sizes: whether requests may have other shapes than the example.
    """

    open_sizes: bool = False

    def __init__(
        self,
        module: nn.Module,
        example_request: Any = None,
        *,
        cut: CutAt = "layers",
        max_batch: int = DEFAULT_MAX_BATCH,
        batch_sizes: Iterable[int] | None = None,
    ) -> None:
        module = uncompiled(module)
        _check_network(module)
        if max_batch < 1:
            raise OptionError(f"max_batch must be at least 1, got {max_batch}")
        sizes = size_ladder(max_batch, exact=8, parts=4) if batch_sizes is None else tuple(batch_sizes)
        self.example_request = example_request
        self.open_sizes = isinstance(module, Opaque) and module.declared is None
        self._module: nn.Module | None = module.eval()
        self.float_dtype = float_dtype_of(module)
        pieces = _cut(module, example_request, self.float_dtype, cut)
        self.layers: list[tuple[str, tuple[Place, ...], int]] = []
        for number, layer in enumerate(pieces.layers):
            name = self._free_name(layer.name)
            self.layers.append((name, layer.sources, layer.num_outputs))
            setattr(self, name, Cell(layer.module, batch_sizes=sizes, priority=number, name=layer.name))
        self.inputs, self.form, self.results, self.keys = pieces.inputs, pieces.form, pieces.results, pieces.keys

    def _free_name(self, name: str) -> str:
        """Return a free attribute name for a layer."""
        name = re.sub(r"\W", "_", name, flags=re.ASCII)
        if not name.isidentifier():
            name = f"layer_{name}"
        while hasattr(self, name):
            name += "_"
        return name

    def unfold(self, request: Any) -> Any:
        inputs = self._rows(request)
        made = run_layers(((getattr(self, name), sources, count) for name, sources, count in self.layers), inputs)
        return self._formed([inputs[k] if layer < 0 else made[layer][k] for layer, k in self.results])

    def length(self, request: Any) -> int:
        """Return 1: all requests have the same length."""
        return 1

    def batched(self, requests: Sequence[Any]) -> list[Any]:
        """Run the module itself on all requests as one batch; a loaded model runs its layers one after the other."""
        rows = [self._rows(request) for request in requests]
        batch = tuple(torch.stack([torch.as_tensor(row) for row in column]) for column in zip(*rows, strict=True))
        with torch.no_grad():
            if isinstance(self._module, Opaque):
                parts = list(self._module(*batch))
            elif self._module is not None:
                returned = self._module(**dict(zip(self.inputs, batch, strict=True)))
                if self.form == "dict":
                    parts = [returned[key] for key in self.keys]
                else:
                    parts = [returned] if self.form == "tensor" else list(returned)
            else:
                cells = self.cells
                made = run_layers(((cells[name].module, places, n) for name, places, n in self.layers), batch)
                parts = [batch[k] if layer < 0 else made[layer][k] for layer, k in self.results]
        return [self._formed([part[i] for part in parts]) for i in range(len(requests))]

    def alone(self, request: Any) -> Any:
        return self.batched([request])[0]

    def given(self, request: Any) -> tuple[Any, ...]:
        """Return the request's values for the inputs, in order. Override this if requests have another form."""
        if type(request) is not StandIn and isinstance(request, Mapping):
            if set(request) != set(self.inputs):
                got = ", ".join(sorted(map(str, request)))
                raise InvalidRequestError(f"a request has {', '.join(self.inputs)}; got {got or 'nothing'}")
            return tuple(request[name] for name in self.inputs)
        if len(self.inputs) == 1:
            return (request,)
        if not isinstance(request, tuple | list) or len(request) != len(self.inputs):
            raise InvalidRequestError(
                f"a request is a tuple or dict of {len(self.inputs)} tensors ({', '.join(self.inputs)}); "
                f"got {type(request).__name__}"
            )
        return tuple(request)

    def saved_state(self) -> dict[str, Any]:
        return {name: value for name, value in super().saved_state().items() if name != "_module"}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._module = None

    def _rows(self, request: Any) -> tuple[Any, ...]:
        """Return a request's rows as arrays or tensors of the right dtype, in order of the inputs.

        Raises InvalidRequestError.
        """
        example = self.example_request
        specs: Sequence[ValueSpec | None] = [None] * len(self.inputs)
        if example is not None and not self.open_sizes:
            specs = [_spec(value, self.float_dtype) for value in self.given(example)]
        return tuple(
            host_value(value, spec, self.float_dtype, f"input {name!r}").values[0]
            for name, value, spec in zip(self.inputs, self.given(request), specs, strict=True)
        )

    def _formed(self, parts: list[Any]) -> Any:
        """Return parts in the form of the network's result."""
        if self.form == "dict":
            return dict(zip(self.keys, parts, strict=True))
        return parts[0] if self.form == "tensor" else parts if self.form == "list" else tuple(parts)


def layers(
    module: nn.Module,
    example_request: Any = None,
    *,
    cut: CutAt = "layers",
    max_batch: int = DEFAULT_MAX_BATCH,
    batch_sizes: Iterable[int] | None = None,
) -> Layered:
    """Return a model whose cells are the layers of a static network, each with the elementwise operations after it.

    - module: dimension 0 of every input and output, and of every value between layers, is the batch. It is put in eval
      mode. The module's result is the result of a request: a tensor, or a tuple, list or dict of tensors.
    - example_request: one row, without the batch: a tensor, or a tuple or dict of tensors for several inputs. With it
      shapes are proved when the engine starts, and torch.export traces modules that torch.fx cannot trace.
    - cut: "layers" begins a cell at every convolution, linear, recurrent or embedding layer, and adds normalisations,
      activations, pooling and sums to the cell before them. "blocks" keeps each child of the module whole (children of
      nn.Sequential and nn.ModuleList count as its own). "whole" makes one cell. A list of submodules, by dotted name or
      by class, begins a cell at each of them. A submodule that cannot be traced stays whole.
    - max_batch, batch_sizes: of every cell, as for Cell.

    Later layers have the higher priority, so that requests in progress end. Raises ModelError with advice for a module
    that cannot be traced.
    """
    return Layered(module, example_request, cut=cut, max_batch=max_batch, batch_sizes=batch_sizes)


# --- cutting --------------------------------------------------------------------------------------------------------


def _check_network(module: Any) -> None:
    """ModelError for an object that is not a network; the message says what to write instead."""
    if isinstance(module, type) and issubclass(module, nn.Module):
        raise ModelError(f"bm.layers takes a module, got the class {module.__name__}; make one: {module.__name__}(...)")
    if not isinstance(module, nn.Module):
        raise ModelError(f"bm.layers takes a torch.nn.Module, got {what_came(module, 'bm.layers')}")


def _cut(module: nn.Module, example_request: Any, float_dtype: str, at: CutAt) -> Cut:
    if isinstance(module, Opaque):
        return whole_opaque(module)
    inputs = input_names(module, example_request)
    if isinstance(module, torch.jit.ScriptModule) and at != "whole":
        raise ModelError(
            'TorchScript cannot be cut into layers: keep it whole with cut="whole", or give the nn.Module that it was '
            "made of"
        )
    if isinstance(at, str) and at not in CUTS:
        raise unknown_name("cut (or a list of submodules)", at, CUTS)
    if at == "whole":
        return whole(module, inputs, _example_rows(inputs, example_request, float_dtype))
    chosen = None if at == "layers" else frozenset(map(id, _chosen(module, at)))
    try:
        traced = trace_modules(module, inputs, lambda part: chosen is not None and id(part) in chosen)
    except Exception as error:  # its code may raise anything on stand-ins
        if chosen is not None:
            raise ModelError(
                f"{type(module).__name__}: torch.fx cannot trace its forward() ({_first_line(error)}); use "
                'cut="layers", for which torch.export is tried too, or cut="whole"'
            ) from error
        traced = _exported(module, inputs, example_request, float_dtype, error)
    normalised_sizes(traced.graph)
    return cut(traced, chosen)


def _example_rows(inputs: tuple[str, ...], example: Any, float_dtype: str) -> tuple[torch.Tensor, ...] | None:
    """Return the example request as a batch of one row per input, None without an example."""
    if example is None:
        return None
    laid = [
        host_value(value, None, float_dtype, "the example request").values for value in _example_values(inputs, example)
    ]
    return tuple([torch.as_tensor(values) for values in laid])


def _example_values(inputs: tuple[str, ...], example: Any) -> tuple[Any, ...]:
    """Return the example request's value for each input."""
    if isinstance(example, Mapping):
        return tuple([example[name] for name in inputs])
    return example if isinstance(example, tuple) else (example,)


def _exported(
    module: nn.Module, inputs: tuple[str, ...], example_request: Any, float_dtype: str, reason: Exception
) -> Traced:
    """Trace with torch.export. reason: why torch.fx has refused."""
    where = f"{type(module).__name__}: torch.fx cannot trace it ({_first_line(reason)})"
    advice = (
        'Keep it whole with cut="whole", take the control flow that depends on values out of forward(), or write a '
        "bm.Model whose unfold decides"
    )
    if example_request is None:
        raise ModelError(
            f"{where}; give an example request, bm.layers(module, example_request), and torch.export is tried, as "
            f"encoders with **kwargs need it. {advice}."
        ) from reason
    values = _example_values(inputs, example_request)
    try:
        traced = trace_operators(by_position(module, inputs), tuple(_spec(value, float_dtype) for value in values))
    except Exception as error:  # its code may raise anything
        raise ModelError(f"{where}, nor can torch.export ({_first_line(error)}). {advice}.") from error
    for node, name in zip((n for n in traced.graph.nodes if n.op == "placeholder"), inputs, strict=True):
        node.target = name
    return traced


def _chosen(module: nn.Module, at: CutAt) -> list[nn.Module]:
    """Return the submodules at which a layer begins."""
    if at == "blocks":
        return list(_blocks(module))
    named = dict(module.named_modules())
    submodules: list[nn.Module] = []
    for wanted in at:
        if isinstance(wanted, str):
            if wanted not in named or wanted == "":
                raise unknown_name("submodule", wanted, [name for name in named if name])
            submodules.append(named[wanted])
        else:
            submodules += [part for part in named.values() if isinstance(part, wanted)]
    if not submodules:
        raise OptionError(f"cut: {type(module).__name__} has none of the submodules {at}")
    return submodules


def _blocks(module: nn.Module) -> Iterable[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            yield from _blocks(child)
        elif has_weights(child):
            yield child


def _spec(value: Any, float_dtype: str) -> ValueSpec:
    """Return the spec of a value of the example request."""
    return host_value(value, None, float_dtype, "the example request").spec


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
