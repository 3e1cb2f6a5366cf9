"""How models appear as tensors: derived from their examples, or declared."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from served_models import Counter, Declared, Pair, Sums, Tempered

from batchmaker.errors import ModelError
from batchmaker.lab import zoo
from batchmaker.server.faults import FaultKind, ServiceError
from batchmaker.server.formats.derived_signature import signature_of
from batchmaker.server.formats.messages import WantedOutput
from batchmaker.server.formats.signature import Signature, TensorSpec
from batchmaker.server.formats.tensors import Tensor
from batchmaker.server.limits import Limits
from batchmaker.server.service.engine_port import EngineOptions, EnginePort

LIMITS = Limits(max_sequence=10)


def signature(model) -> Signature:
    port = EnginePort(model, EngineOptions(threads=1))
    try:
        return signature_of(model, *port.start())
    finally:
        port.stop(drain=True)


def specs(items):
    return [(spec.name, spec.datatype, spec.shape) for spec in items]


@pytest.mark.parametrize(
    ("model", "inputs", "outputs", "stream"),
    [
        (
            lambda: zoo.make("lstm", hidden=6, vocabulary_size=9),
            [("input_0", "INT64", (-1,))], [("output_0", "FP32", (6,))], "result",
        ),
        (
            lambda: zoo.make("gru", hidden=6, vocabulary_size=9, dtype="bfloat16"),
            [("input_0", "INT64", (-1,))], [("output_0", "FP32", (6,))], "result",
        ),
        (
            lambda: zoo.make("seq2seq", hidden=6, vocabulary_size=9),
            [("source", "INT64", (-1,)), ("words", "INT64", (1,))], [("output_0", "INT64", (-1,))], "elements",
        ),
        (
            lambda: zoo.make("treelstm", hidden=6, vocabulary_size=9, output="label"),
            [("words", "INT64", (-1,)), ("children", "INT64", (-1, 2))], [("output_0", "INT64", (1,))], "result",
        ),
        (
            lambda: zoo.make("transformer", hidden=8, heads=2, inner=8, layers=1, vocabulary_size=9, positions=8),
            [("source", "INT64", (-1,)), ("words", "INT64", (1,))], [("output_0", "INT64", (-1,))], "elements",
        ),
        (Counter, [("input_0", "INT64", (1,))], [("output_0", "INT64", (-1,))], "elements"),
        (
            Sums, [("rows", "FP32", (-1, 2)), ("start", "FP32", (-1,))],
            [("total", "FP32", (-1,)), ("steps", "FP32", (-1, 2))], "result",
        ),
        (Pair, [("input_0", "FP32", (-1, 2))], [("output_0", "FP32", (-1,)), ("output_1", "INT64", (1,))], "result"),
        (Declared, [("upto", "INT32", (1,))], [("numbers", "FP64", (-1,))], "elements"),
    ],
)  # fmt: skip
def test_a_model_appears_as_its_example_says(model, inputs, outputs, stream):
    found = signature(model())
    assert specs(found.inputs) == inputs
    assert specs(found.outputs) == outputs
    assert found.stream == stream


def test_defaults_of_unfold_are_optional_inputs():
    found = signature(Tempered())
    assert [(spec.name, spec.datatype, spec.shape, spec.optional) for spec in found.inputs] == [
        ("rows", "FP32", (-1, 2), False), ("temperature", "FP32", (1,), True), ("sign", "BYTES", (1,), True),
    ]  # fmt: skip
    rows = Tensor("rows", "FP32", np.ones((1, 2), np.float32))
    warm = Tensor("temperature", "FP32", np.array([2.0], np.float32))
    assert set(found.to_request([rows], LIMITS)) == {"rows"}
    assert found.to_request([rows, warm], LIMITS)["temperature"] == 2.0
    with pytest.raises(ServiceError, match=r"unknown input 'temprature'.*Did you mean 'temperature'\?"):
        found.to_request([Tensor("temprature", "FP32", warm.data)], LIMITS)


def test_a_default_in_the_example_is_optional_and_of_the_examples_kind():
    model = Tempered()
    model.example_request = {"rows": [[1.0, 2.0]], "temperature": 1, "start": [0.0, 1.0]}
    found = {spec.name: (spec.datatype, spec.shape, spec.optional) for spec in signature(model).inputs}
    assert found == {
        "rows": ("FP32", (-1, 2), False), "temperature": ("INT64", (1,), True), "start": ("FP32", (-1,), True),
        "sign": ("BYTES", (1,), True),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["", 'a"b', "a\\b", "a\nb", "n" * 300])
def test_a_tensor_has_a_name_that_a_client_can_write(name):
    with pytest.raises(ModelError, match="cannot be the name of an input or output"):
        TensorSpec(name, "FP32", (1,))


def test_an_output_is_named_once():
    two = Signature((), (TensorSpec("a", "FP32", (1,)), TensorSpec("b", "FP32", (1,))), result="keys")
    two.check_outputs([WantedOutput("b"), WantedOutput("a")])
    with pytest.raises(ServiceError, match="output 'a' is named twice") as caught:
        two.check_outputs([WantedOutput("a"), WantedOutput("b"), WantedOutput("a", binary=True)])
    assert caught.value.kind is FaultKind.INVALID


@pytest.mark.parametrize(("given", "expected"), [(1e39, "FP32"), (-1e300, "FP32"), (7e4, "FP16")])
def test_a_float_that_does_not_fit_is_refused_and_not_made_infinite(given, expected):
    one = Signature((TensorSpec("x", expected, (-1,)),), (), request="value")
    with pytest.raises(ServiceError, match=f"a value of FP64 does not fit in {expected}"):
        one.to_request([Tensor("x", "FP64", np.array([0.0, given]))], LIMITS)
    kept = one.to_request([Tensor("x", "FP64", np.array([np.inf, np.nan]))], LIMITS)
    assert np.isinf(kept[0])
    assert np.isnan(kept[1])


def test_an_input_that_unfold_would_get_within_a_dict_is_refused_when_the_model_is_loaded():
    class Wrapped(Counter):
        def serving_signature(self):
            return Signature((TensorSpec(self.input, "INT64", (1,)),), ())

    model = Wrapped()
    model.input = "n"
    with pytest.raises(ModelError, match=r"a dict as its only parameter, 'n', .* Say request='value'"):
        signature_of(model, None, [])
    model.input = "number"  # a dict is meant: the parameter is none of its keys
    assert signature_of(model, None, []).request == "keys"


def test_a_model_without_example_or_declaration_is_refused_with_advice():
    model = Counter()
    model.example_request = None
    with pytest.raises(ModelError, match="serving_signature"):
        signature(model)


VALUE = Signature((TensorSpec("x", "INT64", (-1,)),), (), request="value")
KEYS = Signature(
    (TensorSpec("x", "INT64", (-1,)), TensorSpec("n", "INT64", (1,), optional=True)), (), alone="x"
)  # fmt: skip


def ints(name, values, datatype="INT64"):
    return Tensor(name, datatype, np.array(values))


def test_a_request_is_the_value_or_the_dict_of_its_inputs():
    assert VALUE.to_request([ints("x", [1, 2])], LIMITS).tolist() == [1, 2]
    both = KEYS.to_request([ints("x", [1]), ints("n", [5])], LIMITS)
    assert (both["x"].tolist(), both["n"]) == ([1], 5)
    assert KEYS.to_request([ints("x", [3])], LIMITS).tolist() == [3]


def test_whole_numbers_of_any_width_are_taken_if_they_fit():
    small = Tensor("x", "INT8", np.array([1, 2], np.int8))
    assert VALUE.to_request([small], LIMITS).dtype == np.int64
    with pytest.raises(ServiceError, match="18446744073709551615 does not fit in INT64"):
        VALUE.to_request([Tensor("x", "UINT64", np.array([2**64 - 1], np.uint64))], LIMITS)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "input 'x' is missing; the inputs are 'x', 'n' \\(optional\\)"),
        ([ints("y", [1])], "unknown input 'y'"),
        ([ints("x", [1]), ints("x", [1])], "given twice"),
        ([ints("x", [[1]])], r"got shape \[1, 1\], expected \[-1\]"),
        ([ints("x", [1]), ints("n", [1, 2])], r"got shape \[2\], expected \[1\]"),
        ([Tensor("x", "FP32", np.ones(1, np.float32))], "got FP32, expected INT64"),
        ([ints("x", list(range(11)))], "a dimension of 11 is more than 10"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_with_a_reason(given, said):
    with pytest.raises(ServiceError, match=said) as caught:
        KEYS.to_request(given, LIMITS)
    assert caught.value.kind is FaultKind.INVALID


def test_parts_of_a_stream_put_in_a_row_are_the_output():
    streaming = Signature((), (TensorSpec("o", "INT64", (-1,)),), stream="elements")
    parts = [streaming.to_part(value)[0].data for value in (3, 4)]
    assert np.concatenate(parts).tolist() == streaming.to_outputs(torch.tensor([3, 4]))[0].data.tolist()


def test_outputs_come_in_the_order_asked_for():
    two = Signature((), (TensorSpec("a", "FP32", (1,)), TensorSpec("b", "BYTES", (-1,))), result="keys")
    outputs = two.to_outputs({"a": 1.5, "b": ["x", "yz"]}, [WantedOutput("b"), WantedOutput("a")])
    assert [(t.name, t.data.tolist()) for t in outputs] == [("b", [b"x", b"yz"]), ("a", [1.5])]
    with pytest.raises(ServiceError, match="unknown output 'c'; the outputs are 'a', 'b'"):
        two.check_outputs([WantedOutput("c")])
