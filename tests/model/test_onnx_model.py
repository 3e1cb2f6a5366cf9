"""ONNX models are cells: batched, with state, of every dtype; what cannot be batched says so."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import batchmaker as bm
from batchmaker.errors import CellError, ModelError, OptionError, RequestShapeError, ShapeError

sys.path.insert(0, str(Path(__file__).parent))
from onnx_models import (
    DOUBLE_ANY,
    STEP,
    TURNED,
    Both,
    Chain,
    Doubled,
    OpenState,
    W,
    external,
    model_bytes,
    onnx,
    states,
)

RANDOM = np.random.default_rng(0)


def frames(count: int) -> Any:
    return RANDOM.normal(size=(count, 3)).astype(np.float32)


def test_a_chain_over_an_onnx_step_starts_from_zeros_and_is_batched(tmp_path):
    path = tmp_path / "step.onnx"
    path.write_bytes(model_bytes(STEP))
    requests = [frames(count) for count in (5, 1, 3, 7)]
    with bm.Engine(Chain(path)) as engine:
        results = engine.map(requests, progress=False)
        assert engine.registry.notes["step"] == ("left as it is: an ONNX model is opaque",)
    for request, result in zip(requests, results, strict=True):
        np.testing.assert_allclose(result, states(request)[-1], atol=1e-5)


def test_inputs_and_outputs_come_in_the_order_that_is_named():
    class Turned(Chain):
        def unfold(self, given: Any) -> Any:
            projected, _ = self.step.run(given)
            return projected.steps

    model = Turned(model_bytes(TURNED), inputs=["x", "h"], outputs=["projected", "h_next"])
    request = frames(4)
    with bm.Engine(model) as engine:
        (result,) = engine.map([request], progress=False)
    np.testing.assert_allclose(result, request @ W, atol=1e-5)


DTYPES = {
    "float": np.float32, "float16": np.float16, "double": np.float64, "int64": np.int64, "int32": np.int32,
    "int16": np.int16, "int8": np.int8, "uint8": np.uint8, "bool": np.bool_,
}  # fmt: skip


@pytest.mark.parametrize("name", DTYPES)
def test_rows_keep_the_dtype_of_the_file(name):
    graph = f"same ({name}[N, 2] x) => ({name}[N, 2] y) {{ y = Identity(x) }}"
    given = np.array([0, 1]).astype(DTYPES[name])
    with bm.Engine(bm.layers(bm.onnx(model_bytes(graph)))) as engine:
        (result,) = engine.map([given], progress=False)
        (cell,) = engine.registry.types
    assert result.numpy().dtype == given.dtype
    assert cell.inputs[0].dtype == given.dtype.name
    np.testing.assert_array_equal(result, given)


@pytest.mark.parametrize("name", ["int32", "float16"])
def test_data_becomes_the_dtype_of_the_file_also_where_a_size_is_open(name):
    graph = f"same ({name}[N, T] x) => ({name}[N, T] y) {{ y = Identity(x) }}"
    given = [1, 2, 3] if name == "int32" else [1.0, 2.0, 3.0]
    with bm.Engine(bm.layers(bm.onnx(model_bytes(graph)))) as engine:
        (result,) = engine.map([given], progress=False)
    assert result.numpy().dtype.name == name
    assert result.tolist() == given


def test_an_open_size_is_a_type_of_its_own_for_each_request_that_brings_another():
    with bm.Engine(Doubled(max_shapes=2)) as engine:
        for width in (3, 5, 3):
            (result,) = engine.map([np.ones(width, np.float32)], progress=False)
            assert result.tolist() == [2.0] * width
        with pytest.raises(RequestShapeError, match=r"2 shapes of its inputs.*max_shapes="):
            engine.map([np.ones(4, np.float32)], progress=False)


def test_two_cells_of_one_file_are_one_type():
    with bm.Engine(Both(model_bytes(STEP))) as engine:
        engine.map([frames(3)], progress=False)
        assert len(engine.registry.types) == 1


def test_an_onnx_model_is_a_model_of_its_own_with_dicts_by_name():
    network = bm.layers(bm.onnx(model_bytes(TURNED)), {"h": [0.0] * 4, "x": [0.0] * 3})
    x = frames(2)
    rows = [{"x": row, "h": np.zeros(4)} for row in x]
    with bm.Engine(network) as engine:
        results = engine.map(rows, progress=False)
    for result, row, alone in zip(results, x, network.batched(rows), strict=True):
        assert set(result) == {"h_next", "projected"}
        np.testing.assert_allclose(result["h_next"], states(row[None])[0], atol=1e-5)
        np.testing.assert_allclose(result["projected"], alone["projected"], atol=1e-6)


def test_a_state_of_an_open_size_starts_from_zeros_where_it_is_declared():
    with bm.Engine(OpenState()) as engine:
        (result,) = engine.map([np.ones((3, 2), np.float32)], progress=False)
    assert result.tolist() == [3.0, 3.0]
    message = r"state 's' is float32\[\?\].*state=\(64, 128\)"
    with bm.Engine(OpenState(max_shapes=1)) as engine, pytest.raises(ModelError, match=message):
        engine.map([np.ones((3, 2), np.float32)], progress=False)


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        ("f (float[1, 3] x) => (float[1, 3] y) { y = Tanh(x) }", r"'x' has a fixed batch of 1.*dynamic_shapes=\{'x'"),
        ("f (float[N, 3] x) => (float[1, 3] y) { y = ReduceSum<keepdims=1>(x, a) }", None),
        ("f (float x) => (float y) { y = Tanh(x) }", r"input 'x' has no dimensions, so there is no batch"),
        ("f (string[N] x) => (string[N] y) { y = Identity(x) }", r"'x' is of type tensor\(string\)"),
        ("f (bfloat16[N] x) => (bfloat16[N] y) { y = Identity(x) }", r"'x' is of type tensor\(bfloat16\)"),
    ],
)
def test_what_cannot_be_batched_says_what_is_wrong_with_it(graph, message):
    if message is None:
        graph = graph.replace("{", "<int64[1] a = {0}> {", 1)
        message = r"output 'y' has a fixed batch of 1"
    with pytest.raises(ModelError, match=message):
        bm.onnx(model_bytes(graph))


MIXING = {
    "mean over the batch": "f (float[N, 3] x) => (float[N, 3] y) { m = ReduceMean<axes=[0]>(x)  y = Sub(x, m) }",
    "the batch among the sizes": "f (float[N, 3] x) => (float[N, M] y) { t = Transpose(x)  y = MatMul(x, t) }",
    "time first": """f (float[T, N] x) => (float[T, N] y) <int64 a = {0}> { y = CumSum(x, a) }""",
}


@pytest.mark.parametrize("name", MIXING)
def test_rows_that_depend_on_each_other_are_found_before_they_are_served(name):
    message = r"Rows must not depend on each other|may not depend on the batch"
    with bm.Engine(bm.layers(bm.onnx(model_bytes(MIXING[name])))) as engine, pytest.raises(ModelError, match=message):
        engine.map([np.ones(3, np.float32)], progress=False)


def test_wrong_inputs_say_which_and_what_was_wanted():
    with bm.Engine(Chain(model_bytes(STEP))) as engine:
        with pytest.raises(RequestShapeError, match=r"input 0: got rows of shape \(2,\), expected \(3,\)"):
            engine.map([np.ones((4, 2), np.float32)], progress=False)
        engine.map([frames(2)], progress=False)
    message = r"input 0 \('x'\): got rows of int64\[\], expected float32\[\?\]"
    with bm.Engine(Doubled()) as engine, pytest.raises(ShapeError, match=message):
        engine.map([3], progress=False)


def test_an_error_of_onnx_runtime_is_that_requests_alone():
    graph = """f (int64[N] word) => (float[N, 2] y) <float[3, 2] table = {0.0, 1.0, 2.0, 3.0, 4.0, 5.0}>
        { y = Gather(table, word) }"""
    with bm.Engine(bm.layers(bm.onnx(model_bytes(graph)))) as engine:
        futures = [engine.submit(word) for word in (2, 7, 1)]
        with pytest.raises(CellError, match=r"out of data bounds|indices element"):
            futures[1].result()
        assert futures[0].result().tolist() == [4.0, 5.0]
        assert futures[2].result().tolist() == [2.0, 3.0]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: bm.onnx("nowhere.onnx"), ModelError, r"nowhere\.onnx: cannot be read.*No such file"),
        (lambda: bm.onnx(b"no model"), ModelError, "is not an ONNX file"),
        (lambda: bm.onnx(b""), ModelError, "ONNX"),
        (lambda: bm.onnx(3), ModelError, r"takes the path of an \.onnx file, or its bytes, got int"),
        (lambda: bm.onnx(model_bytes(STEP), threads=0), OptionError, "threads must be at least 1"),
        (lambda: bm.onnx(model_bytes(STEP), inputs=["x", "y"]), OptionError, "unknown input of the ONNX model 'y'"),
        (lambda: bm.onnx(model_bytes(STEP), inputs=["x"]), OptionError, "inputs leaves out h"),
        (lambda: bm.onnx(model_bytes(STEP), outputs=[]), OptionError, "at least one"),
        (lambda: bm.Cell("a/model.onnx"), ModelError, r"Write bm\.Cell\(bm\.onnx\('a/model\.onnx'\)\)"),
        (lambda: bm.layers(Path("model.onnx")), ModelError, r"Write bm\.layers\(bm\.onnx\('model\.onnx'\)\)"),
        (lambda: bm.Cell(onnx.ModelProto()), ModelError, r"bm\.Cell\(bm\.onnx\(model\.SerializeToString\(\)\)\)"),
    ],
)
def test_what_is_no_onnx_model_is_refused_with_what_to_do(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_without_onnx_runtime_the_error_says_what_to_install(monkeypatch):
    there = builtins.__import__

    def missing(name: str, *rest: Any, **named: Any) -> Any:
        if name == "onnxruntime":
            raise ImportError("No module named 'onnxruntime'")
        return there(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ModelError, match=r"pip install 'batchmaker\[onnx\]'"):
        bm.onnx(model_bytes(STEP))


def test_weights_in_a_file_of_their_own_are_read_too(tmp_path):
    request = frames(3)
    with bm.Engine(Chain(external(tmp_path))) as engine:
        (result,) = engine.map([request], progress=False)
    np.testing.assert_allclose(result, states(request)[-1], atol=1e-5)


def test_bytes_cannot_name_other_files(tmp_path, monkeypatch):
    content = external(tmp_path).read_bytes()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="other file"):
        bm.onnx(content)


def test_an_open_model_of_unknown_rows_is_proved_at_its_first_use():
    with bm.Engine(bm.layers(bm.onnx(model_bytes(DOUBLE_ANY)))) as engine:
        (result,) = engine.map([[1.0, 2.0]], progress=False)
    assert result.tolist() == [2.0, 4.0]
