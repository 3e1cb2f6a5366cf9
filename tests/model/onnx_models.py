"""ONNX models written by hand, and models around them, whose classes must be found by import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import batchmaker as bm

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

HEADER = '<ir_version: 8, opset_import: ["" : 17]>'
W = np.arange(1, 13, dtype=np.float32).reshape(3, 4) / 10
STEP = """step (float[N, 3] x, float[N, 4] h) => (float[N, 4] h_next)
    <float[3, 4] w = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2}>
    { wx = MatMul(x, w)  sum = Add(wx, h)  h_next = Tanh(sum) }"""
TURNED = """turned (float[N, 4] h, float[N, 3] x) => (float[N, 4] h_next, float[N, 4] projected)
    <float[3, 4] w = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2}>
    { projected = MatMul(x, w)  sum = Add(projected, h)  h_next = Tanh(sum) }"""
DOUBLE_ANY = "double (float[N, T] x) => (float[N, T] y) { y = Add(x, x) }"


def model_bytes(graph: str) -> bytes:
    """An ONNX model in bytes. graph: in ONNX's text form."""
    made: bytes = onnx.parser.parse_model(HEADER + graph).SerializeToString()
    return made


def states(frames: NDArray[Any]) -> NDArray[Any]:
    """What STEP gives for each of the frames [n, 3], from zeros: [n, 4]."""
    h, made = np.zeros(4), []
    for x in frames:
        h = np.tanh(x @ W + h)
        made.append(h)
    return np.array(made)


class Chain(bm.Model):
    """STEP over frames. model: what bm.onnx takes. options: of bm.onnx."""

    example_request = [[0.0] * 3] * 2

    def __init__(self, model: Any, **options: Any) -> None:
        self.step = bm.Cell(bm.onnx(model, **options), batch_sizes=(1, 2, 4))

    def unfold(self, frames: Any) -> Any:
        return self.step.run(frames)


class Doubled(bm.Model):
    """DOUBLE_ANY on rows of any width."""

    def __init__(self, **options: Any) -> None:
        self.double = bm.Cell(bm.onnx(model_bytes(DOUBLE_ANY)), batch_sizes=(1, 2), **options)

    def unfold(self, row: Any) -> Any:
        return self.double(row)


class Both(bm.Model):
    """Two cells of one ONNX model."""

    def __init__(self, model: Any) -> None:
        self.there = bm.Cell(bm.onnx(model), batch_sizes=(1, 2))
        self.back = bm.Cell(bm.onnx(model), batch_sizes=(1, 2))

    def unfold(self, frames: Any) -> Any:
        return self.there.run(frames), self.back.run(frames[::-1])


class OpenState(bm.Model):
    """Sums rows of any width, from zeros of the width that is declared."""

    def __init__(self, **options: Any) -> None:
        graph = "sum (float[N, T] x, float[N, T] s) => (float[N, T] t) { t = Add(x, s) }"
        options = options or {"state": (2,), "max_shapes": 3}
        self.add = bm.Cell(bm.onnx(model_bytes(graph)), batch_sizes=(1, 2), **options)

    def unfold(self, rows: Any) -> Any:
        return self.add.run(rows)


def external(folder: Path, location: str = "weights.bin") -> Path:
    """STEP in a file whose weights are in another one, weights.bin. location: where the file says that they are."""
    path = folder / "step.onnx"
    made = onnx.load_from_string(model_bytes(STEP))
    made.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(W, "w"))  # raw bytes, which alone can be outside
    onnx.save(made, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    made = onnx.load(path, load_external_data=False)
    for entry in made.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = location
    path.write_bytes(made.SerializeToString())
    return path
