"""Inference requests and responses as messages of gRPC."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from batchmaker.server.faults import invalid
from batchmaker.server.formats.messages import InferRequest, InferResponse, Parameter, WantedOutput
from batchmaker.server.formats.parameters import DAY_S, refuse_unsupported
from batchmaker.server.formats.tensors import Tensor, from_raw, from_values, num_elements, to_raw
from batchmaker.server.limits import Limits
from batchmaker.server.rpc.schema import CHOICE, MESSAGES

FINAL: Final = "triton_final_response"
"""Parameter of the responses in a stream: whether it is the last one to its request."""

PARTS: Final = "triton_enable_empty_final_response"
"""Parameter of a request in a stream: send values as they come, then a response without any."""

_CONTENTS: Final[dict[str, str]] = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""The field of each datatype's elements, for a tensor that is not raw. The others are sent raw only."""


def read_infer(message: Any, limits: Limits, remaining_s: float | None) -> InferRequest:
    """Return the request in a ModelInferRequest. INVALID or UNSUPPORTED unless it is well formed.

    remaining_s: until the call's own deadline, if it has one; it is used as `deadline_ms` if that is later or missing.
    """
    if len(message.inputs) > limits.max_tensors:
        raise invalid(f"{len(message.inputs)} inputs are more than {limits.max_tensors}")
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise invalid(f"{len(message.inputs)} inputs came with {len(raw)} raw_input_contents; send one for each")
    inputs = tuple(_read_input(tensor, raw[at] if raw else None) for at, tensor in enumerate(message.inputs))
    outputs: list[WantedOutput] = []
    for output in message.outputs:
        refuse_unsupported(output.name, parameters_of(output.parameters))
        outputs.append(WantedOutput(output.name))
    parameters = parameters_of(message.parameters)
    if remaining_s is not None and remaining_s <= DAY_S:
        remaining_ms = max(1e3 * remaining_s, 1e-3)
        sent_ms = parameters.get("deadline_ms")
        is_wrong = isinstance(sent_ms, bool | str)  # which is told so, whatever this call's own deadline is
        if sent_ms is None or (not is_wrong and remaining_ms <= float(sent_ms) <= 1e3 * DAY_S):
            parameters["deadline_ms"] = remaining_ms
    return InferRequest(inputs, tuple(outputs), message.id, parameters)


def _read_input(tensor: Any, raw: bytes | None) -> Tensor:
    refuse_unsupported(tensor.name, parameters_of(tensor.parameters))
    num_elements(tensor.name, tensor.datatype, tensor.shape)  # its error should come first
    if raw is None:
        field = _CONTENTS.get(tensor.datatype)
        if field is None:
            raise invalid(f"tensor {tensor.name!r}: {tensor.datatype[:32]!r} is sent as raw_input_contents only")
        others = [other.name for other, _ in tensor.contents.ListFields() if other.name != field]
        if others:
            raise invalid(
                f"tensor {tensor.name!r}: its values are in {others[0]}; those of {tensor.datatype} go in {field}"
            )
        return from_values(tensor.name, tensor.datatype, tensor.shape, getattr(tensor.contents, field)[:])
    if tensor.HasField("contents"):
        raise invalid(f"tensor {tensor.name!r} has both contents and raw_input_contents; send one of them")
    return from_raw(tensor.name, tensor.datatype, tensor.shape, memoryview(raw))


def parameters_of(parameters: Mapping[str, Any]) -> dict[str, Parameter]:
    """Return parameters as plain values; None for one that has no value."""
    chosen = ((name, value, value.WhichOneof(CHOICE)) for name, value in parameters.items())
    return {name: None if choice is None else getattr(value, choice) for name, value, choice in chosen}


def write_infer(response: InferResponse) -> Any:
    """Return a response as a ModelInferResponse, its outputs raw."""
    message = MESSAGES["ModelInferResponse"](model_name=response.model, model_version=response.version, id=response.id)
    for tensor in response.outputs:
        message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_output_contents.append(to_raw(tensor))
    for name, value in response.parameters.items():
        setattr(message.parameters[name], "bool_param" if isinstance(value, bool) else "string_param", value)
    return message
