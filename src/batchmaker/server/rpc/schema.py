"""The implemented messages of the Open Inference Protocol v2, with Triton's extensions.

They are described here and built at import, in a descriptor pool of their own. Generated code would use the pool of the
process, which refuses the same names from a client's library. On the wire only numbers and types count. Fields that are
missing here are skipped when a client sends them.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, Final

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from batchmaker.server.faults import invalid

PACKAGE: Final = "inference"
SERVICE: Final = f"{PACKAGE}.GRPCInferenceService"

_MODEL: Final = "name: 1 string; version: 2 string"
_COMPUTE: Final = (
    "compute_input: {} StatisticDuration; compute_infer: {} StatisticDuration; compute_output: {} StatisticDuration"
)
_MESSAGES: Final[dict[str, str]] = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "live: 1 bool",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "ready: 1 bool",
    "ModelReadyRequest": _MODEL,
    "ModelReadyResponse": "ready: 1 bool",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "name: 1 string; version: 2 string; extensions: 3 list string",
    "ModelMetadataRequest": _MODEL,
    "ModelMetadataResponse": "name: 1 string; versions: 2 list string; platform: 3 string; "
    "inputs: 4 list TensorMetadata; outputs: 5 list TensorMetadata",
    "TensorMetadata": "name: 1 string; datatype: 2 string; shape: 3 list int64",
    "ModelConfigRequest": _MODEL,
    "ModelConfigResponse": "config: 1 ModelConfig",
    "ModelConfig": "name: 1 string; platform: 2 string; backend: 17 string; max_batch_size: 4 int32; "
    "input: 5 list ModelInput; output: 6 list ModelOutput; model_transaction_policy: 19 ModelTransactionPolicy; "
    "sequence_batching: 13 choice ModelSequenceBatching; parameters: 14 map ModelParameter",
    "ModelSequenceBatching": "max_sequence_idle_microseconds: 1 uint64",
    "ModelInput": "name: 1 string; data_type: 2 DataType; dims: 4 list int64; optional: 8 bool",
    "ModelOutput": "name: 1 string; data_type: 2 DataType; dims: 3 list int64",
    "ModelTransactionPolicy": "decoupled: 1 bool",
    "ModelParameter": "string_value: 1 string",
    "ModelStatisticsRequest": _MODEL,
    "ModelStatisticsResponse": "model_stats: 1 list ModelStatistics",
    "ModelStatistics": "name: 1 string; version: 2 string; last_inference: 3 uint64; inference_count: 4 uint64; "
    "execution_count: 5 uint64; inference_stats: 6 InferStatistics; batch_stats: 7 list InferBatchStatistics; "
    "memory_usage: 8 list MemoryUsage",
    "InferStatistics": "success: 1 StatisticDuration; fail: 2 StatisticDuration; queue: 3 StatisticDuration; "
    f"{_COMPUTE.format(4, 5, 6)}; cache_hit: 7 StatisticDuration; cache_miss: 8 StatisticDuration",
    "InferBatchStatistics": f"batch_size: 1 uint64; {_COMPUTE.format(2, 3, 4)}",
    "MemoryUsage": "type: 1 string; id: 2 int64; byte_size: 3 uint64",
    "StatisticDuration": "count: 1 uint64; ns: 2 uint64",
    "RepositoryIndexRequest": "repository_name: 1 string; ready: 2 bool",
    "RepositoryIndexResponse": "models: 1 list ModelIndex",
    "ModelIndex": "name: 1 string; version: 2 string; state: 3 string; reason: 4 string",
    "RepositoryModelLoadRequest": "repository_name: 1 string; model_name: 2 string; "
    "parameters: 3 map ModelRepositoryParameter",
    "RepositoryModelLoadResponse": "",
    "RepositoryModelUnloadRequest": "repository_name: 1 string; model_name: 2 string; "
    "parameters: 3 map ModelRepositoryParameter",
    "RepositoryModelUnloadResponse": "",
    "ModelRepositoryParameter": "bool_param: 1 choice bool; int64_param: 2 choice int64; "
    "string_param: 3 choice string; bytes_param: 4 choice bytes",
    "ModelInferRequest": "model_name: 1 string; model_version: 2 string; id: 3 string; "
    "parameters: 4 map InferParameter; inputs: 5 list InferInputTensor; outputs: 6 list InferRequestedOutputTensor; "
    "raw_input_contents: 7 list bytes",
    "InferInputTensor": "name: 1 string; datatype: 2 string; shape: 3 list int64; parameters: 4 map InferParameter; "
    "contents: 5 InferTensorContents",
    "InferRequestedOutputTensor": "name: 1 string; parameters: 2 map InferParameter",
    "InferTensorContents": "bool_contents: 1 list bool; int_contents: 2 list int32; int64_contents: 3 list int64; "
    "uint_contents: 4 list uint32; uint64_contents: 5 list uint64; fp32_contents: 6 list float; "
    "fp64_contents: 7 list double; bytes_contents: 8 list bytes",
    "InferParameter": "bool_param: 1 choice bool; int64_param: 2 choice int64; string_param: 3 choice string; "
    "double_param: 4 choice double; uint64_param: 5 choice uint64",
    "ModelInferResponse": "model_name: 1 string; model_version: 2 string; id: 3 string; "
    "parameters: 4 map InferParameter; outputs: 5 list InferOutputTensor; raw_output_contents: 6 list bytes",
    "InferOutputTensor": "name: 1 string; datatype: 2 string; shape: 3 list int64; parameters: 4 map InferParameter; "
    "contents: 5 InferTensorContents",
    "ModelStreamInferResponse": "error_message: 1 string; infer_response: 2 ModelInferResponse",
}
"""Each field as `name: number [list | map | choice] type`. The keys of a map are strings; only one choice is set."""

_DATA_TYPES: Final = tuple(
    f"TYPE_{name}"
    for name in (
        "INVALID", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
        "FP16", "FP32", "FP64", "STRING", "BF16",
    )
)  # fmt: skip
"""The values of the enumeration DataType, from 0 on."""

CHOICE: Final = "parameter_choice"
_OTHER_CHOICES: Final = {"ModelConfig": "scheduling_choice"}
"""The names of choices, by message."""


def messages_of(package: str, messages: Mapping[str, str], enums: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the class of each message by name, built in a descriptor pool of their own.

    messages: fields as in _MESSAGES. enums: the names of each one's values, from 0 on.
    """
    file = FileDescriptorProto(name=f"batchmaker/{package}.proto", package=package, syntax="proto3")
    for name, values in enums.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for text in filter(None, fields.split("; ")):
            _field(message, text, package, enums)
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in messages}


def _field(message: DescriptorProto, text: str, package: str, enums: Container[str]) -> None:
    """Add a field in the notation of _MESSAGES."""
    name, _, rest = text.partition(":")
    number, *forms, kind = rest.split()
    field = message.field.add(name=name, number=int(number), label=FieldDescriptorProto.LABEL_OPTIONAL)
    if "map" in forms:
        entry = message.nested_type.add(name="".join(part.title() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        _field(entry, "key: 1 string", package, enums)
        _field(entry, f"value: 2 {kind}", package, enums)
        kind = f"{message.name}.{entry.name}"
    if "map" in forms or "list" in forms:
        field.label = FieldDescriptorProto.LABEL_REPEATED
    if "choice" in forms:
        if not message.oneof_decl:
            message.oneof_decl.add(name=_OTHER_CHOICES.get(message.name, CHOICE))
        field.oneof_index = 0
    if kind in enums:
        field.type = FieldDescriptorProto.TYPE_ENUM
    elif kind[0].isupper():
        field.type = FieldDescriptorProto.TYPE_MESSAGE
    else:
        field.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")
    if kind[0].isupper():
        field.type_name = f".{package}.{kind}"


MESSAGES: Final = messages_of(PACKAGE, _MESSAGES, {"DataType": _DATA_TYPES})
"""The class of each message, by its name."""


def decode(name: str, data: bytes, messages: Mapping[str, Any] = MESSAGES) -> Any:
    """Return the message of this name from its bytes. INVALID if they are malformed, or too many small parts."""
    if len(data) > _SMALL_BYTES:
        _check_parts(data, messages[name].DESCRIPTOR)
    try:
        return messages[name].FromString(data)
    except DecodeError:
        raise invalid(
            f"the message is no {messages[name].DESCRIPTOR.full_name}: its bytes are malformed, or a text in it is not "
            "UTF-8"
        ) from None


_SMALL_BYTES: Final = 1 << 16
_MOST_PARTS: Final = 10_000
_UNCOUNTED: Final = "InferTensorContents"
"""Its values are data: they take at most some ten times their bytes."""


def _check_parts(data: bytes, descriptor: Any) -> None:
    """Raise INVALID for more fields than a request has. An empty one has two bytes, and ninety in memory."""
    num_parts = 0
    places = [(0, len(data), descriptor)]
    while places:
        at, end, kind = places.pop()
        while at < end:
            tag, at = _varint(data, at)
            number, form = tag >> 3, tag & 7
            num_parts += 1
            if num_parts > _MOST_PARTS or form not in _FIXED_BYTES:
                raise invalid(f"the message has more than {_MOST_PARTS} parts, or groups; send raw_input_contents")
            if form == _LENGTH:
                size, at = _varint(data, at)
                inner = kind.fields_by_number.get(number)
                if inner is not None and inner.message_type and inner.message_type.name != _UNCOUNTED:
                    places.append((at, min(at + size, end), inner.message_type))
                at += size
            elif form == _VARINT:
                at = _varint(data, at)[1]
            else:
                at += _FIXED_BYTES[form]


_VARINT, _LENGTH = 0, 2
_FIXED_BYTES: Final = {_VARINT: 0, 1: 8, _LENGTH: 0, 5: 4}
"""The bytes of a field by its wire type; those of the first and third say it themselves."""


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number and the place after it. Of what is malformed, whatever: it is refused by whoever decodes it."""
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        shift += 7
        if byte < 0x80:
            break
    return value, at
