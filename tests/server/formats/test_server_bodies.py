"""Bodies: JSON with or without binary tensors behind it, and `generate` with plain JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmaker.server.faults import FaultKind, ServiceError
from batchmaker.server.formats import generate_body, infer_body
from batchmaker.server.formats.completions import read_ask
from batchmaker.server.formats.generate_body import write_generate
from batchmaker.server.formats.infer_body import write_infer
from batchmaker.server.formats.messages import InferRequest, InferResponse, WantedOutput
from batchmaker.server.formats.pieces import at_once
from batchmaker.server.formats.signature import Signature, TensorSpec
from batchmaker.server.formats.tensors import Tensor
from batchmaker.server.limits import Limits

LIMITS = Limits(max_tensors=3)
TENSORS = Signature(tuple(TensorSpec(name, "INT32", (-1,)) for name in "abcd"), ())


def read_infer(body, header_length, limits) -> InferRequest:
    """All pieces at once."""
    return at_once(infer_body.read_infer(body, header_length, TENSORS, limits))


def read_generate(body, signature) -> InferRequest:
    """All pieces at once."""
    return at_once(generate_body.read_generate(body, signature, Limits()))


def body(*inputs, raw=b"", **more):
    head = json.dumps({"inputs": list(inputs), **more}).encode()
    return head + raw, str(len(head)) if raw else None


def tensor(name, raw=None, **more):
    entry = {"name": name, "shape": [2], "datatype": "INT32", **more}
    if raw is not None:
        entry["parameters"] = {"binary_data_size": raw}
    return entry


def test_tensors_behind_the_json_are_taken_in_order():
    first, second = np.array([1, 2], np.int32), np.array([3, 4], np.int32)
    mixed = [tensor("a", 8), tensor("b", data=[7, 8]), tensor("c", 8)]
    request = read_infer(*body(*mixed, raw=first.tobytes() + second.tobytes(), id="r"), LIMITS)
    assert [(t.name, t.data.tolist()) for t in request.inputs] == [("a", [1, 2]), ("b", [7, 8]), ("c", [3, 4])]
    assert request.id == "r"


@pytest.mark.parametrize(
    ("sent", "length", "said"),
    [
        (body(tensor("a"))[0], None, "neither data nor binary_data_size"),
        (body(tensor("a", data=[]))[0], None, "got 0 elements, expected 2"),
        (body(tensor("a", 8, data=[1, 2]), raw=bytes(8))[0], "99", "has both|not the JSON"),
        (b"{}", "3", "Length is 3, but the body has 2"),
        (b"{}", "-1", "must be a number"),
        (b"{}", None, "inputs"),
        (b'{"inputs": 3}', None, r"\$.inputs"),
        (b"\xff\xfe", None, "not the JSON"),
        (b"[" * 100_000, None, "JSON|nested"),
        (body(*[tensor(n, data=[1, 2]) for n in "abcd"])[0], None, "more than 3 inputs"),
    ],
)
def test_malformed_bodies_are_refused_with_a_reason(sent, length, said):
    with pytest.raises(ServiceError, match=said) as caught:
        read_infer(sent, length, LIMITS)
    assert caught.value.kind is FaultKind.INVALID


def test_binary_sizes_must_add_up():
    sent, length = body(tensor("a", 8), raw=bytes(9))
    with pytest.raises(ServiceError, match="1 bytes are left"):
        read_infer(sent, length, LIMITS)
    sent, length = body(tensor("a", 80), raw=bytes(8))
    with pytest.raises(ServiceError, match="binary_data_size is 80, but 8 bytes follow"):
        read_infer(sent, length, LIMITS)


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        ("8", "'8'"), ("eight", "'eight'"), ("x" * 999, "'xxx.*\\.\\.\\.$"), (8.0, "8.0"), (8.5, "8.5"), (True, "true"),
        (-1, "-1"),
    ],
)  # fmt: skip
def test_a_binary_size_is_a_whole_number(size, shown):
    sent, length = body(tensor("a", size), raw=bytes(8))
    wanted = (
        "tensor 'a': binary_data_size must be a whole number, how many of the bytes after the JSON are the tensor's"
    )
    with pytest.raises(ServiceError, match=f"{wanted}, got {shown}") as caught:
        read_infer(sent, length, LIMITS)
    assert caught.value.kind is FaultKind.INVALID


def test_who_forgets_the_length_of_the_json_is_told_the_header():
    sent, _ = body(tensor("a", 8), raw=bytes(8))
    with pytest.raises(ServiceError, match="need the header Inference-Header-Content-Length"):
        read_infer(sent, None, LIMITS)


@pytest.mark.parametrize(
    ("text", "offset", "half"),
    [
        (r"\ud800", 0, r"\ud800"),
        (r"\uDFFF\ud800", 0, r"\uDFFF"),
        (r"a\\\udc00", 3, r"\udc00"),
        (r"\ud83d\ude00\ude00", 12, r"\ude00"),
        (r"\ud83d\ud83d\ude00", 0, r"\ud83d"),
        (r"\udbffx", 0, r"\udbff"),
    ],
)
def test_half_of_a_character_is_refused_with_its_place_wherever_it_is(text, offset, half):
    whole = r"\ud83d\ude00 \\ud800"
    bodies = [
        (read_generate, f'{{"text": "{whole} {text}"}}', SIGNATURE),
        (read_generate, f'{{"words": [1], "id": "{whole}{text}"}}', SIGNATURE),
        (read_generate, f'{{"words": [1], "parameters": {{"sequence_id": "{text}"}}}}', SIGNATURE),
        (read_generate, f'{{"{text}": [1]}}', SIGNATURE),
        (lambda sent, _: read_infer(sent, None, LIMITS), f'{{"inputs": [], "id": "{text}"}}', None),
        (lambda sent, _: read_ask(sent), f'{{"model": "m", "prompt": "{text}"}}', None),
    ]
    for read, sent, how in bodies:
        at = sent.rindex(text) + offset
        with pytest.raises(ServiceError) as caught:
            read(sent.encode(), how)
        assert caught.value.kind is FaultKind.INVALID
        assert f"{half} (byte {at}) is half of a character; send both halves" in str(caught.value)


def test_whole_characters_in_escapes_are_read():
    request = read_generate(rb'{"text": "\ud83d\ude00 \\ud800 \u0000"}', SIGNATURE)
    assert request.inputs[0].data.tolist() == ["\U0001f600 \\ud800 \0".encode()]


@pytest.mark.parametrize(
    "asked",
    [
        body(tensor("a", parameters={"shared_memory_region": "r"}, data=[1, 2]))[0],
        body(tensor("a", data=[1, 2]), outputs=[{"name": "o", "parameters": {"classification": 2}}])[0],
    ],
)
def test_what_is_not_implemented_is_said_to_be(asked):
    with pytest.raises(ServiceError) as caught:
        read_infer(asked, None, LIMITS)
    assert caught.value.kind is FaultKind.UNSUPPORTED


@given(st.binary(max_size=200), st.none() | st.text(max_size=8))
def test_any_body_is_read_or_refused_as_the_clients_fault(sent, length):
    with pytest.raises(ServiceError):
        read_infer(sent, length, LIMITS)


OUTPUTS = (Tensor("x", "FP32", np.array([1.5, 2.5], "<f4")), Tensor("y", "INT64", np.array([[7]], "<i8")))
RESPONSE = InferResponse("m", "3", OUTPUTS, "id-1")


def test_outputs_are_json_unless_asked_for_as_bytes():
    content, length = write_infer(RESPONSE, InferRequest(()))
    assert length is None
    assert json.loads(content) == {
        "model_name": "m", "model_version": "3", "id": "id-1",
        "outputs": [
            {"name": "x", "datatype": "FP32", "shape": [2], "data": [1.5, 2.5]},
            {"name": "y", "datatype": "INT64", "shape": [1, 1], "data": [7]},
        ],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "binary"),
    [
        (InferRequest((), parameters={"binary_data_output": True}), ["x", "y"]),
        (InferRequest((), (WantedOutput("x", True), WantedOutput("y"))), ["x"]),
        (
            InferRequest((), (WantedOutput("x", False), WantedOutput("y")), parameters={"binary_data_output": True}),
            ["y"],
        ),
    ],
)
def test_each_output_is_sent_as_the_client_wants_it(asked, binary):
    content, length = write_infer(RESPONSE, asked)
    head = json.loads(content[:length])
    sizes = {o["name"]: o["parameters"]["binary_data_size"] for o in head["outputs"] if "parameters" in o}
    assert sorted(sizes) == binary
    assert len(content) == length + sum(sizes.values())
    raw = {t.name: t.data.tobytes() for t in OUTPUTS}
    assert content[length:] == b"".join(raw[name] for name in binary)


SIGNATURE = Signature(
    (TensorSpec("words", "INT64", (-1,)), TensorSpec("pairs", "INT64", (-1, 2)), TensorSpec("text", "BYTES", (1,))), ()
)


def test_generate_takes_plain_values():
    request = read_generate(
        b'{"words": [1, 2], "pairs": [], "text": "hi", "id": "i", "parameters": {"timeout": 5}}', SIGNATURE
    )
    shapes = {t.name: t.shape for t in request.inputs}
    assert shapes == {"words": (2,), "pairs": (0, 2), "text": (1,)}
    assert (request.id, request.parameters) == ("i", {"timeout": 5})


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b'{"word": [1]}', "unknown key 'word'; known: 'words'"),
        (b"[1]", "not the JSON"),
        (b'{"words": {"a": 1}}', "no INT64"),
        (
            b'{"pairs": [[1, 2], [3]]}',
            "other lengths than the first.*elements as one flat list and the lengths as another",
        ),
        (b'{"pairs": [[1], [2, 3]]}', "other lengths than the first"),
        (b'{"pairs": [3, [1, 2]]}', "other lengths than the first"),
        (b'{"pairs": [[1], [2]]}', r"got shape \[2, 1\], expected \[-1, 2\]"),
        (b'{"id": 3}', "not the JSON"),
        (b'{"parameters": []}', "not the JSON"),
        (b'{"words": [1], "pairs": [], "words": [2]}', "the key 'words' is sent twice"),
        (b'{"words": [1], "\\u0077ords": [2]}', "the key 'words' is sent twice"),
        (b'{"parameters": {"priority": 1, "priority": 2}}', "the key 'priority' is sent twice"),
        (b"{" + b", ".join([b'"id": "i"'] * 1_000_000) + b"}", "the key 'id' is sent twice"),
    ],
)
def test_generate_refuses_what_it_does_not_know(sent, said):
    with pytest.raises(ServiceError, match=said):
        read_generate(sent, SIGNATURE)


def test_generate_answers_with_plain_values():
    outputs = (Tensor("one", "INT64", np.array([4])), Tensor("many", "BYTES", np.array([b"a", b"\xff"], object)))
    answer = json.loads(write_generate(InferResponse("m", "1", outputs, single=frozenset({"one"}))))
    assert answer == {"model_name": "m", "model_version": "1", "one": 4, "many": ["a", "�"]}


NOT_FINITE = InferResponse("m", "1", (Tensor("x", "FP32", np.array([1.0, np.nan, np.inf], "<f4")),))


def test_a_result_that_json_cannot_represent_is_an_error_unless_null_is_asked_for():
    for written in (lambda: write_generate(NOT_FINITE), lambda: write_infer(NOT_FINITE, InferRequest(()))):
        with pytest.raises(ServiceError, match="'x' has values that are NaN or infinite") as caught:
            written()
        assert caught.value.kind is FaultKind.UNSUPPORTED
    assert json.loads(write_generate(NOT_FINITE, nulls=True))["x"] == [1.0, None, None]
    content, _ = write_infer(NOT_FINITE, InferRequest(()), nulls=True)
    assert json.loads(content)["outputs"][0]["data"] == [1.0, None, None]


def test_bytes_carry_nan_and_infinities():
    content, length = write_infer(NOT_FINITE, InferRequest((), parameters={"binary_data_output": True}))
    assert np.array_equal(np.frombuffer(content[length:], "<f4"), NOT_FINITE.outputs[0].data, equal_nan=True)
