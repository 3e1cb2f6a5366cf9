"""Chunks and answers of a connection, as its query says; and which connections are let in."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmaker.server.faults import FaultKind, ServiceError
from batchmaker.server.formats.chunk_form import ChunkForm
from batchmaker.server.formats.messages import InferResponse
from batchmaker.server.formats.signature import Signature, TensorSpec
from batchmaker.server.formats.tensors import NUMPY, Tensor, to_raw
from batchmaker.server.http.middleware import key_in_protocols

AUDIO = TensorSpec("audio", "FP32", (-1, 3))
WORD = TensorSpec("word", "BYTES", (1,))
LOUD, PITCH = TensorSpec("loud", "FP32", (-1,)), TensorSpec("pitch", "INT64", (-1,))


def signature(*inputs, outputs=(LOUD,)):
    return Signature(inputs, outputs)


def refused(form, message) -> str:
    with pytest.raises(ServiceError) as caught:
        form.read(message)
    assert caught.value.kind is FaultKind.INVALID
    return str(caught.value)


@given(
    datatype=st.sampled_from([name for name in NUMPY if name != "BYTES"]),
    rows=st.integers(0, 5),
    width=st.lists(st.integers(1, 4), max_size=2),
    place=st.integers(0, 2),
)
def test_bytes_are_the_values_of_whatever_shape_their_number_gives(datatype, rows, width, place):
    shape = [*width]
    shape.insert(min(place, len(width)), -1)
    spec = TensorSpec("x", datatype, tuple(shape))
    data = np.zeros([rows if size == -1 else size for size in shape], NUMPY[datatype]) + 1
    sent = to_raw(Tensor("x", datatype, data.astype(NUMPY[datatype])))
    (read,) = ChunkForm(signature(spec), {}).read(sent).inputs
    assert (read.name, read.datatype, read.shape) == ("x", datatype, data.shape)
    np.testing.assert_array_equal(read.data, data)
    if rows and len(sent) > rows:
        assert "is no whole number of rows" in refused(ChunkForm(signature(spec), {}), sent[:-1])


def test_a_shape_that_is_fixed_needs_exactly_its_bytes():
    form = ChunkForm(signature(TensorSpec("x", "FP32", (2, 3))), {})
    assert form.read(bytes(24)).inputs[0].shape == (2, 3)
    assert "got 20 bytes, expected 24" in refused(form, bytes(20))


@pytest.mark.parametrize(
    ("inputs", "meant"),
    [
        ((AUDIO,), "audio"),
        ((AUDIO, TensorSpec("language", "BYTES", (1,), optional=True)), "audio"),
        ((TensorSpec("x", "FP32", (-1,), optional=True),), "x"),
        ((AUDIO, TensorSpec("gain", "FP32", (1,))), None),
        ((WORD,), None),
        ((TensorSpec("x", "FP32", (-1, -1)),), None),
        ((TensorSpec("x", "FP32", (-1, 0)),), None),
    ],
)
def test_bytes_are_for_models_with_one_tensor_of_numbers(inputs, meant):
    form = ChunkForm(signature(*inputs), {})
    if meant is None:
        assert "send each chunk as JSON" in refused(form, bytes(12))
    else:
        assert form.read(bytes(12)).inputs[0].name == meant


def test_parameters_of_the_connection_are_every_chunks_unless_it_has_its_own():
    form = ChunkForm(signature(AUDIO), {"deadline_ms": "50", "priority": "2"})
    assert form.read(bytes(12)).parameters == {"deadline_ms": 50.0, "priority": 2}
    said = json.dumps({"audio": [[1, 2, 3]], "parameters": {"deadline_ms": 7}})
    assert form.read(said).parameters == {"deadline_ms": 7, "priority": 2}
    assert form.priority > ChunkForm(signature(AUDIO), {}).priority == 0


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"answer": "json"}, "Did you mean 'answers'?"),
        ({"answers": "xml"}, "answers must be json or binary"),
        ({"output": "loudness"}, "unknown output 'loudness'"),
        ({"deadline_ms": "nan"}, "deadline_ms"),
        ({"deadline_ms": "x"}, "must be a number"),
        ({"priority": "1.5"}, "must be a number"),
        ({"answers": "binary"}, "name one as output=NAME"),
    ],
)
def test_a_query_that_cannot_be_meant_is_refused(query, said):
    with pytest.raises(ServiceError, match=said.replace("?", r"\?")) as caught:
        ChunkForm(signature(AUDIO, outputs=(LOUD, PITCH)), query)
    assert caught.value.kind is FaultKind.INVALID


def test_answers_are_json_or_the_values_of_one_output():
    loud = Tensor("loud", "FP32", np.array([0.5, 1.0], np.float32))
    response = InferResponse("m", "1", (loud,), "a")
    assert json.loads(ChunkForm(signature(AUDIO), {}).write(response)) == {
        "model_name": "m", "model_version": "1", "id": "a", "loud": [0.5, 1.0],
    }  # fmt: skip
    form = ChunkForm(signature(AUDIO, outputs=(PITCH, LOUD)), {"answers": "binary", "output": "loud"})
    assert [wanted.name for wanted in form.read(bytes(12)).outputs] == ["loud"]
    assert form.write(response) == np.array([0.5, 1.0], "<f4").tobytes()


def test_half_of_a_character_in_a_control_is_named():
    with pytest.raises(ServiceError, match=r"'end' is no input .* \\ud800 \(byte 9\) is half of a character"):
        ChunkForm(signature(AUDIO), {}).read_control('{"end": "\\ud800"}')


def test_an_error_says_its_status_and_when_to_try_again():
    fault = ServiceError(FaultKind.UNAVAILABLE, "too much", 1.5)
    assert json.loads(ChunkForm.write_fault(fault, "a")) == {
        "error": "too much", "status": 503, "retry_after_s": 1.5, "id": "a",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("protocols", "key"),
    [
        ([], None), (["batchmaker"], None), (["batchmaker", "batchmaker.key.YQ"], "a"),
        (["batchmaker.key.YWI-_w"], None), (["batchmaker.key.YcO8Yg"], "aüb"), (["batchmaker.key.a"], None),
    ],
)  # fmt: skip
def test_a_page_sends_its_key_as_a_subprotocol(protocols, key):
    assert key_in_protocols(protocols) == key
