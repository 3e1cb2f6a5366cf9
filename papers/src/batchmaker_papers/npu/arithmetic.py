"""The work of one ATen call for an accelerator: products, arithmetic on single values, and moved values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from batchmaker.errors import ModelError
from batchmaker_papers.npu.accelerator import Activations, Operation, OwnGemm, SharedGemm, Streamed, VectorWork, Weights

_SOFTMAX_PASSES: Final = 4
"""Lane operations per value: the maximum, the exponential of the difference, the sum, the division."""
_NORM_PASSES: Final = 4
"""Lane operations per value: the mean, the variance, normalising, scale and shift."""


@dataclass(frozen=True, slots=True)
class AtenCall:
    """One ATen call for a batch of one row.

    target: the overload. args: the arguments. out: its first output. is_shared: whether a tensor is a weight, or
    computed from weights alone. read: Weights of a tensor, None if this cell has read it before.
    """

    target: torch._ops.OpOverload
    args: tuple[Any, ...]
    tensors: tuple[Tensor, ...]
    out: Tensor
    is_shared: Callable[[Tensor], bool]
    read: Callable[[Tensor], Weights | None]

    @property
    def name(self) -> str:
        """The operator without overload; in-place operators count as others."""
        return str(self.target._schema.name).removeprefix("aten::").rstrip("_")

    @property
    def own(self) -> list[Tensor]:
        """The arguments that belong to the request."""
        return [tensor for tensor in self.tensors if not self.is_shared(tensor)]

    def weights(self) -> list[Operation]:
        """Return the traffic of reading all shared arguments."""
        reads = [self.read(tensor) for tensor in self.tensors if self.is_shared(tensor)]
        return [weights for weights in reads if weights is not None]

    def moved(self) -> Activations:
        """Return all of the request's values as read, and the output as written."""
        return Activations(sum(tensor.numel() for tensor in self.own), self.out.numel())


def operations_of_call(call: AtenCall) -> list[Operation]:
    """Return the operations of the call for one request.

    ModelError for an operator that applies weights in an unknown way.
    """
    name = call.name
    if name in _FREE or name.startswith(("new_", "sym_")) or name.endswith("_like"):
        return []
    if name in _RULES:
        return _RULES[name](call)
    if name.startswith("_scaled_dot_product"):
        return _attention(call)
    if "batch_norm" in name:
        return [*call.weights(), VectorWork(call.out.numel())]  # one fused multiply-add per value
    if name.endswith(("layer_norm", "group_norm", "rms_norm")):
        return [*call.weights(), VectorWork(_NORM_PASSES * call.out.numel()), call.moved()]
    if name.endswith("softmax"):
        return [VectorWork(_SOFTMAX_PASSES * call.out.numel()), call.moved()]
    work = VectorWork(max(tensor.numel() for tensor in (*call.own, call.out)))
    if torch.Tag.pointwise in call.target.tags:
        others = sum(tensor.numel() for tensor in call.own[1:])  # the first is taken over from what made it
        return [*call.weights(), work, Activations(others, 0)]
    if any(call.is_shared(tensor) and tensor.dim() > 1 for tensor in call.tensors):
        raise ModelError(
            f"what torch.ops.aten.{name} does with its weights is not known, so its cost cannot be told. Write it with "
            "matrix products, convolutions and operations on single values."
        )
    return [work, call.moved()]


_FREE: Final = frozenset(
    """alias arange as_strided chunk detach empty expand eye full lift_fresh _local_scalar_dense movedim narrow ones
    permute _reshape_alias scalar_tensor select slice split split_with_sizes squeeze swapaxes t transpose unbind unfold
    unsafe_split _unsafe_view unsqueeze view view_as zeros""".split()  # noqa: SIM905
)
"""Views, and tensors that are the same for every request."""


def _product(call: AtenCall) -> list[Operation]:
    """mm, bmm, mv and their forms with a third argument that is added."""
    left, right = call.args[-2:] if call.name in ("mm", "bmm", "mv") else call.args[1:3]
    k = left.shape[-1]
    m = left.shape[-2] if left.dim() > 1 else 1
    n = 1 if call.name in ("mv", "addmv") else right.shape[-1]
    count = left.shape[0] if left.dim() == 3 else 1
    if not call.is_shared(left) and not call.is_shared(right):
        return [OwnGemm(count, m, k, n), *call.weights(), call.moved()]
    weight = left if call.is_shared(left) else right
    if call.is_shared(left):
        m, n = n, m
    one_weight = count == 1 or weight.stride(0) == 0
    gemm = SharedGemm(m * count, k, n) if one_weight else SharedGemm(m, k, n, count)
    return [gemm, *call.weights(), call.moved()]


def _convolution(call: AtenCall) -> list[Operation]:
    x, weight = call.args[:2]
    transposed, groups = call.args[6], call.args[8]
    window = math.prod(weight.shape[2:])
    if transposed:
        pixels = x.numel() // x.shape[1]
        k, n = weight.shape[0] // groups, weight.shape[1] * window
    else:
        pixels = call.out.numel() // call.out.shape[1]
        k, n = weight.shape[1] * window, weight.shape[0] // groups
    rest = [*call.weights(), call.moved()]
    if groups > 1 and weight.shape[0 if transposed else 1] == (groups if transposed else 1):  # depthwise
        return [VectorWork(max(x.numel(), call.out.numel()) * window), *rest]
    if call.is_shared(weight):
        return [SharedGemm(pixels, k, n, groups), *rest]
    return [OwnGemm(groups, pixels, k, n), *rest]


def _attention(call: AtenCall) -> list[Operation]:
    """Scaled dot products with softmax: keys and values belong to the request, so nothing is shared."""
    query, key, value = call.args[:3]
    count = math.prod(query.shape[:-2])
    steps, width = query.shape[-2:]
    seen = key.shape[-2]
    softmax = VectorWork((1 + _SOFTMAX_PASSES) * count * steps * seen)
    products = [OwnGemm(count, steps, width, seen), OwnGemm(count, steps, seen, value.shape[-1])]
    return [*products, softmax, call.moved()]


def _look_up(call: AtenCall) -> list[Operation]:
    """Rows of a table: only the requested rows are moved."""
    table, values = call.args[0], call.out.numel()
    return [Streamed(values)] if call.is_shared(table) else [Activations(values, values)]


def _write_into(call: AtenCall) -> list[Operation]:
    """Values written into a larger tensor: only they are moved, whatever the call returns."""
    arguments = call.target._schema.arguments
    by_name = {argument.name: value for argument, value in zip(arguments, call.args, strict=False)}
    written = [by_name[name] for name in ("values", "src", "source") if isinstance(by_name.get(name), Tensor)]
    indices = [by_name[name] for name in ("index",) if isinstance(by_name.get(name), Tensor)]
    values = next((tensor.numel() for tensor in (*written, *indices)), call.out.numel())
    return [Activations(values, values)]


def _copy(call: AtenCall) -> list[Operation]:
    return [Activations(call.out.numel(), call.out.numel())]


def _pool(call: AtenCall) -> list[Operation]:
    kernel = call.args[1]
    dimensions = call.out.dim() - 2
    window = math.prod(kernel if len(kernel) == dimensions else [kernel[0]] * dimensions)
    return [VectorWork(call.out.numel() * window), call.moved()]


def _all_of(
    names: str, rule: Callable[[AtenCall], list[Operation]]
) -> dict[str, Callable[[AtenCall], list[Operation]]]:
    return dict.fromkeys(names.split(), rule)


_RULES: Final[dict[str, Callable[[AtenCall], list[Operation]]]] = {
    **_all_of("mm bmm mv addmm addbmm baddbmm addmv", _product),
    **_all_of("convolution", _convolution),
    **_all_of("embedding index index_select gather take", _look_up),
    **_all_of(
        "index_put index_copy index_add index_fill scatter scatter_add scatter_reduce slice_scatter select_scatter",
        _write_into,
    ),
    **_all_of("cat clone _to_copy copy constant_pad_nd flip repeat roll stack", _copy),
    **_all_of("max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d", _pool),
}


def merged(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """Return the same work with as few operations as possible.

    Additive operations of a kind are joined, empty ones dropped.
    """
    result: list[Operation] = []
    lanes = streamed = weights = 0
    for operation in operations:
        match operation:
            case VectorWork(lane_operations):
                lanes += lane_operations
            case Streamed(values):
                streamed += values
            case Weights(values):
                weights += values
            case Activations(0, 0):
                pass
            case _:
                result.append(operation)
    if lanes:
        result.append(VectorWork(lanes))
    if streamed:
        result.append(Streamed(streamed))
    if weights:
        result.append(Weights(weights))
    return tuple(result)
