"""Messages of gRPC: the same on the wire as those of tritonclient, read and written without loss."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from grpc._cython import cygrpc
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tritonclient.grpc import service_pb2

from batchmaker.server.config import Config, GrpcConfig
from batchmaker.server.faults import FaultKind, ServiceError
from batchmaker.server.formats.messages import InferResponse
from batchmaker.server.formats.parameters import call_options
from batchmaker.server.formats.tensors import NUMPY, Tensor
from batchmaker.server.limits import Limits
from batchmaker.server.rpc.schema import MESSAGES, decode
from batchmaker.server.rpc.server import rpc_options
from batchmaker.server.rpc.wire import read_infer, write_infer

SHARED = sorted(name for name in MESSAGES if hasattr(service_pb2, name))


def read(message, remaining_s=None):
    """What the server reads of a message that tritonclient's classes wrote."""
    return read_infer(decode("ModelInferRequest", message.SerializeToString()), Limits(), remaining_s)


def request(*inputs, raw=(), outputs=(), **parameters):
    message = service_pb2.ModelInferRequest(model_name="m", inputs=inputs, outputs=outputs, raw_input_contents=raw)
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
        setattr(message.parameters[name], kind, value)
    return message


def given_tensor(name, datatype, shape, **contents):
    return {"name": name, "datatype": datatype, "shape": shape, **({"contents": contents} if contents else {})}


# --- against tritonclient's own descriptors ---------------------------------------------------------------------------


def assert_same(ours, theirs, seen):
    """Every field of ours is theirs too, by name, number, type and label; and so on within."""
    if ours.full_name in seen:
        return
    seen.add(ours.full_name)
    for field in ours.fields:
        other = theirs.fields_by_name[field.name]
        assert (field.number, field.type, field.is_repeated) == (other.number, other.type, other.is_repeated)
        assert _choice(field) == _choice(other)
        if field.message_type:
            assert field.message_type.GetOptions().map_entry == other.message_type.GetOptions().map_entry
            assert_same(field.message_type, other.message_type, seen)
        if field.enum_type:
            values = [
                {value.name: value.number for value in kind.values} for kind in (field.enum_type, other.enum_type)
            ]
            assert values[0] == values[1]


def _choice(field):
    return field.containing_oneof.name if field.containing_oneof else None


@pytest.mark.parametrize("name", SHARED)
def test_a_message_has_the_numbers_and_types_that_clients_know(name):
    assert_same(MESSAGES[name].DESCRIPTOR, getattr(service_pb2, name).DESCRIPTOR, set())


def test_every_call_has_its_messages():
    assert len(SHARED) > 30
    assert {name for name in SHARED if name.endswith("Request")} >= {"ModelInferRequest", "RepositoryIndexRequest"}


# --- tensors ----------------------------------------------------------------------------------------------------------

WIDE = {
    name: dtype for name, dtype in NUMPY.items() if name not in ("BF16", "BYTES")
}  # the types that NumPy and tritonclient share


@given(st.data())
def test_a_tensor_arrives_as_tritonclient_sent_it_and_returns_as_it_was(data):
    datatype = data.draw(st.sampled_from(sorted(WIDE)))
    array = data.draw(arrays.arrays(WIDE[datatype], arrays.array_shapes(min_dims=0, min_side=0)))
    sent = triton.InferInput("x", list(array.shape), datatype)
    sent.set_data_from_numpy(array)
    (tensor,) = read(request(sent._get_tensor(), raw=[sent._get_content()])).inputs
    np.testing.assert_array_equal(tensor.data, array)
    answer = write_infer(InferResponse("m", "1", (tensor,), "id"))
    received = triton.InferResult(service_pb2.ModelInferResponse.FromString(answer.SerializeToString()))
    np.testing.assert_array_equal(received.as_numpy("x"), array)


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_bytes_carry_their_lengths(items):
    array = np.empty(len(items), object)
    array[:] = items
    sent = triton.InferInput("x", [len(items)], "BYTES")
    sent.set_data_from_numpy(array)
    content = sent._get_content() or b""
    (tensor,) = read(request(sent._get_tensor(), raw=[content])).inputs
    assert tensor.data.tolist() == items
    (raw,) = write_infer(InferResponse("m", "1", (tensor,))).raw_output_contents
    assert raw == content
    (tensor,) = read(request(given_tensor("x", "BYTES", [len(items)], bytes_contents=items))).inputs
    assert tensor.data.tolist() == items


def test_bf16_is_raw():
    (tensor,) = read(request(given_tensor("x", "BF16", [2]), raw=[b"\x80\x3f\x00\xc0"])).inputs
    assert tensor.data.tolist() == [1.0, -2.0]
    (raw,) = write_infer(InferResponse("m", "1", (Tensor("x", "BF16", tensor.data),))).raw_output_contents
    assert raw == b"\x80\x3f\x00\xc0"


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [
        ("BOOL", "bool_contents", [True, False]),
        ("INT8", "int_contents", [-128, 127]),
        ("INT16", "int_contents", [-(2**15), 2**15 - 1]),
        ("INT32", "int_contents", [-(2**31), 2**31 - 1]),
        ("INT64", "int64_contents", [-(2**63), 2**63 - 1]),
        ("UINT8", "uint_contents", [0, 255]),
        ("UINT16", "uint_contents", [0, 2**16 - 1]),
        ("UINT32", "uint_contents", [0, 2**32 - 1]),
        ("UINT64", "uint64_contents", [0, 2**64 - 1]),
        ("FP32", "fp32_contents", [0.5, -1.5]),
        ("FP64", "fp64_contents", [0.1, -1e300]),
    ],
)
def test_a_tensor_may_be_sent_as_values(datatype, field, values):
    (tensor,) = read(request(given_tensor("x", datatype, [2, 1], **{field: values}))).inputs
    assert tensor.data.dtype == NUMPY[datatype]
    assert tensor.data.tolist() == [[value] for value in values]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (request(given_tensor("x", "INT8", [1], int_contents=[300])), "outside the range of INT8"),
        (request(given_tensor("x", "INT64", [3], int64_contents=[1])), "got 1 elements, expected 3"),
        (
            request(given_tensor("x", "INT64", [1], fp32_contents=[1])),
            "are in fp32_contents; those of INT64 go in int64",
        ),
        (request(given_tensor("x", "INT64", [0], int_contents=[1])), "are in int_contents; those of INT64 go in int64"),
        (request(given_tensor("x", "INT64", [1], int64_contents=[1], fp32_contents=[2])), "are in fp32_contents"),
        (request(given_tensor("x", "FP16", [1], fp32_contents=[1])), "raw_input_contents only"),
        (request(given_tensor("x", "INT65", [1], int64_contents=[1])), "unknown datatype 'INT65'"),
        (request(given_tensor("x", "INT64", [-1], int64_contents=[1])), "negative size"),
        (request(given_tensor("x", "INT64", [1]), given_tensor("y", "INT64", [1]), raw=[b"\0" * 8]), "one for each"),
        (request(given_tensor("x", "INT64", [1], int64_contents=[1]), raw=[b"\0" * 8]), "both contents and raw"),
        (request(given_tensor("x", "INT64", [2]), raw=[b"\0" * 8]), "got 8 bytes, expected 16"),
        (request(given_tensor("x", "BYTES", [1]), raw=[b"\xff\xff\xff\xff"]), "by its length"),
        (request(*[given_tensor("x", "INT64", [0])] * 65), "65 inputs are more than 64"),
    ],
)
def test_a_malformed_tensor_is_refused(message, said):
    with pytest.raises(ServiceError, match=said) as caught:
        read(message)
    assert caught.value.kind is FaultKind.INVALID


SMALL_PARTS = {
    "inputs": b"\x2a\x00",
    "outputs": b"\x32\x00",
    "raw inputs": b"\x3a\x00",
    "parameters": b"\x22\x00",
    "parameters of an input": b"\x2a\x82\x80\x04" + b"\x22\x00" * 32_769,
    "sizes of a shape, one by one": b"\x2a\x82\x80\x04" + b"\x18\x01" * 32_769,
    "nothing that is known": b"\x78\x01",
    "groups": b"\x7b\x7c",
}


@pytest.mark.parametrize("parts", SMALL_PARTS)
def test_a_message_of_a_great_many_small_parts_is_refused_before_it_becomes_large(parts):
    with pytest.raises(ServiceError, match="parts, or groups") as caught:
        decode("ModelInferRequest", SMALL_PARTS[parts] * (1 + 70_000 // len(SMALL_PARTS[parts])))
    assert caught.value.kind is FaultKind.INVALID


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_large_messages_are_taken_exactly_if_small_ones_are(before, after):
    large = b"\x3a\x80\x80\x08" + bytes(1 << 17)  # a raw input
    small = b"\x3a\x00"
    outcomes = []
    for content in (before + large + after, before + small + after):
        try:
            outcomes.append(len(decode("ModelInferRequest", content).raw_input_contents))
        except ServiceError:
            outcomes.append(None)
    assert outcomes[0] is None or outcomes[0] == outcomes[1]


@pytest.mark.parametrize("values", [{"int64_contents": [1] * 200_000}, {"bytes_contents": [b""] * 100_000}])
def test_values_of_a_tensor_are_data_and_may_be_many(values):
    ((_, items),) = values.items()
    kind = "INT64" if "int64_contents" in values else "BYTES"
    (tensor,) = read(request(given_tensor("x", kind, [len(items)], **values))).inputs
    assert tensor.shape == (len(items),)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_request_or_refused(data):
    kinds = set()
    try:
        read_infer(decode("ModelInferRequest", data), Limits(), None)
    except ServiceError as fault:
        kinds.add(fault.kind)
    assert kinds <= {FaultKind.INVALID, FaultKind.UNSUPPORTED}


@pytest.mark.parametrize("place", ["inputs", "outputs"])
def test_shared_memory_and_classification_are_refused_as_not_supported(place):
    for name in ("shared_memory_region", "classification"):
        parameters = {name: service_pb2.InferParameter(int64_param=2)}
        tensor = given_tensor("x", "INT64", [1], int64_contents=[1])
        message = request({**tensor, "parameters": parameters}) if place == "inputs" else request(
            tensor, outputs=[{"name": "o", "parameters": parameters}]
        )  # fmt: skip
        with pytest.raises(ServiceError) as caught:
            read(message)
        assert caught.value.kind is FaultKind.UNSUPPORTED


# --- deadlines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent_ms", "remaining_s", "deadline_ms"),
    [
        (None, None, None),
        (None, 0.5, 500.0),
        (200, 0.5, 200),
        (900.0, 0.5, 500.0),
        (900, None, 900),
        (None, 1e9, None),
        (None, 0.0, 1e-3),
    ],
)
def test_the_earlier_of_two_deadlines_counts(sent_ms, remaining_s, deadline_ms):
    asked = request() if sent_ms is None else request(deadline_ms=sent_ms)
    assert call_options(read(asked, remaining_s).parameters).deadline_ms == deadline_ms


@pytest.mark.parametrize("remaining_s", [None, 1e-4, 0.5])
@pytest.mark.parametrize("wrong", ["soon", "", 0, -5, 0.0, float("nan"), float("inf"), -float("inf"), True, False])
def test_a_wrong_deadline_is_refused_whatever_that_of_the_call_is(wrong, remaining_s):
    with pytest.raises(ServiceError, match="'deadline_ms' must be a number of milliseconds above 0") as caught:
        call_options(read(request(deadline_ms=wrong), remaining_s).parameters)
    assert caught.value.kind is FaultKind.INVALID


def test_the_core_of_grpc_knows_every_setting_that_it_is_given():
    """It ignores names that it does not know."""
    core = Path(cygrpc.__file__).read_bytes()
    assert [name for name, _ in rpc_options(Config()) if name.encode() + b"\0" not in core] == []


def test_pings_are_as_the_settings_say():
    pings = GrpcConfig(
        keepalive_time_ms=1, keepalive_timeout_ms=2, keepalive_permit_without_calls=False,
        http2_max_pings_without_data=3, http2_min_recv_ping_interval_without_data_ms=4, http2_max_ping_strikes=5,
    )  # fmt: skip
    given_to_core = dict(rpc_options(Config(grpc=pings)))
    for name, value in {
        "grpc.keepalive_time_ms": 1,
        "grpc.keepalive_timeout_ms": 2,
        "grpc.keepalive_permit_without_calls": 0,
        "grpc.http2.max_pings_without_data": 3,
        "grpc.http2.min_ping_interval_without_data_ms": 4,
        "grpc.http2.max_ping_strikes": 5,
    }.items():
        assert given_to_core[name] == value


@pytest.mark.slow
def test_no_generated_code_ties_the_server_to_one_version_of_protobuf():
    """Generated code refuses an older protobuf than the one that made it, such as what tritonclient brings."""
    script = (
        "import sys, batchmaker.server.rpc.server, batchmaker.server.rpc.health, batchmaker.fleet.front_rpc;"
        "print([name for name in sys.modules if name.endswith(('_pb2', '_pb2_grpc'))])"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "['google.protobuf.descriptor_pb2']"
