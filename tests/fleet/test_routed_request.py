"""What the front reads of a request."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2

from batchmaker.fleet.routed_request import RoutedRequest, request_of_generate, request_of_infer, request_of_message
from batchmaker.server.formats.parameters import ChunkOptions
from batchmaker.server.rpc.schema import decode


def infer_body(shape, datatype="INT64", data=(), **parameters):
    tensor = {"name": "input_0", "shape": shape, "datatype": datatype, "data": list(data)}
    return json.dumps({"inputs": [tensor], "parameters": parameters}).encode()


def test_the_elements_of_tensors_are_counted_in_json_and_in_bytes():
    assert request_of_infer("m", None, infer_body([12], data=range(12)), None) == RoutedRequest("m", None, 12, None)
    head = infer_body([12])
    body = head + np.arange(12).tobytes()
    assert request_of_infer("m", "2", body, str(len(head))) == RoutedRequest("m", "2", 12, None)


def test_the_elements_of_plain_json_are_counted():
    body = json.dumps({"source": [3, 4, 5], "rows": [[1, 2], [3, 4]], "one": 7, "id": "a", "parameters": {}}).encode()
    assert request_of_generate("m", None, body).elements == 8


def test_a_long_text_is_more_than_a_short_one():
    short, long = (request_of_generate("m", None, json.dumps({"text": "word " * n}).encode()).elements for n in (4, 40))
    assert 8 * short < long < 12 * short


def test_a_sequence_is_found_in_each_form():
    chunk = ChunkOptions("ann", start=True)
    parameters = {"sequence_id": "ann", "sequence_start": True}
    assert request_of_infer("m", None, infer_body([1], **parameters), None).chunk == chunk
    body = json.dumps({"input_0": 1, "parameters": parameters}).encode()
    assert request_of_generate("m", None, body).chunk == chunk


def test_a_message_of_grpc_is_read_as_tritonclient_writes_it():
    given = triton.InferInput("input_0", [5], "INT64")
    given.set_data_from_numpy(np.arange(5))
    message = service_pb2.ModelInferRequest(model_name="m", inputs=[given._get_tensor()])
    message.parameters["sequence_id"].int64_param = 9
    message.parameters["sequence_end"].bool_param = True
    message.raw_input_contents.append(np.arange(5).tobytes())
    request = request_of_message(decode("ModelInferRequest", message.SerializeToString()))
    assert request == RoutedRequest("m", None, 5, ChunkOptions(9, end=True))


@pytest.mark.parametrize(
    "body",
    [b"", b"nonsense", b"[1]", b'{"inputs": 3}', infer_body([10**18]), infer_body([3], sequence_id=[1]), b"[" * 5000],
)
def test_what_is_wrong_is_left_to_the_replica(body):
    for request in (request_of_infer("m", None, body, None), request_of_generate("m", None, body)):
        assert 1 <= request.elements <= max(1, len(body))
        assert request.chunk is None


@pytest.mark.parametrize(
    "shape", [[2**62, 0], [2**62] * 16, [2**63 - 1] * 200_000, [-(2**62), 3], [2**62] * 200_000 + [0]]
)
def test_no_shape_takes_long_to_weigh_or_weighs_more_than_its_bytes(shape):
    body = infer_body(shape)
    assert 1 <= request_of_infer("m", None, body, None).elements <= len(body)


@pytest.mark.parametrize("length", ["9" * 5000, "-1", "²", "", "0x10"])
def test_a_length_that_is_none_is_left_to_the_replica(length):
    assert request_of_infer("m", None, infer_body([3]), length).elements >= 1
