"""Tensors survive the way out and in, and what is malformed is refused with a reason."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from batchmaker.server.faults import FaultKind, ServiceError
from batchmaker.server.formats.json_tensors import read_json
from batchmaker.server.formats.pieces import at_once
from batchmaker.server.formats.tensors import NUMPY, Tensor, from_raw, to_json, to_raw


def from_json(name, datatype, shape, data) -> Tensor:
    """All pieces at once."""
    return at_once(read_json(name, datatype, shape, data, lambda shape: None))


NUMBERS = sorted(set(NUMPY) - {"BYTES", "BF16"})
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


@st.composite
def number_tensors(draw, *, finite: bool = False):
    datatype = draw(st.sampled_from(NUMBERS))
    finite_only = {"allow_nan": False, "allow_infinity": False} if finite and datatype.startswith("FP") else {}
    elements = hnp.from_dtype(NUMPY[datatype], **finite_only)
    return Tensor("x", datatype, draw(hnp.arrays(NUMPY[datatype], draw(SHAPES), elements=elements)))


@st.composite
def string_tensors(draw, items):
    shape = draw(SHAPES)
    data = np.empty(int(np.prod(shape)), object)
    data[:] = draw(st.lists(items, min_size=len(data), max_size=len(data)))
    return Tensor("x", "BYTES", data.reshape(shape))


def same(ours: Tensor, theirs: Tensor) -> bool:
    if (ours.datatype, ours.shape) != (theirs.datatype, theirs.shape):
        return False
    if ours.datatype == "BYTES":
        return ours.data.tolist() == theirs.data.tolist()
    return bool(np.array_equal(ours.data, theirs.data, equal_nan=ours.datatype.startswith("FP")))


@given(number_tensors() | string_tensors(st.binary(max_size=9)))
def test_bytes_carry_every_tensor_unchanged(tensor):
    raw = to_raw(tensor)
    assert same(from_raw("x", tensor.datatype, tensor.shape, memoryview(raw)), tensor)


@given(number_tensors(finite=True) | string_tensors(st.text(max_size=9).map(str.encode)))
def test_json_carries_every_finite_tensor_unchanged(tensor):
    data = msgspec.json.encode(to_json(tensor))
    assert same(from_json("x", tensor.datatype, tensor.shape, data), tensor)


@given(hnp.arrays(np.int64, hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=3)))
def test_nested_json_lists_are_read_as_flat_ones(array):
    tensor = from_json("x", "INT64", array.shape, json.dumps(array.tolist()).encode())
    assert np.array_equal(tensor.data, array)


@given(st.lists(st.floats(width=32), max_size=8))
def test_bf16_is_rounded_once_and_then_stays(values):
    tensor = Tensor("x", "BF16", np.array(values, np.float32))
    once = from_raw("x", "BF16", tensor.shape, memoryview(to_raw(tensor)))
    again = from_raw("x", "BF16", tensor.shape, memoryview(to_raw(once)))
    assert np.array_equal(once.data, again.data, equal_nan=True)
    assert np.array_equal(np.isnan(once.data), np.isnan(tensor.data))
    inside = np.isfinite(once.data) & (np.abs(tensor.data) > 1e-30)
    error = np.abs(once.data[inside] - tensor.data[inside])
    assert (error <= np.abs(tensor.data[inside]) / 256).all()


def test_bf16_agrees_with_torch():
    import torch

    values = torch.linspace(-3, 3, 1001)
    expected = values.to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    assert to_raw(Tensor("x", "BF16", values.numpy())) == expected


def test_what_is_read_does_not_share_memory_with_the_body():
    raw = bytearray(np.arange(3, dtype=np.int64).tobytes())
    tensor = from_raw("x", "INT64", (3,), memoryview(raw))
    raw[:] = bytes(24)
    assert tensor.data.tolist() == [0, 1, 2]
    assert tensor.data.flags.writeable


def read_or_refused(read, datatype, shape, data) -> Tensor | None:
    """The tensor, or None where the client is told that it is wrong. Anything else that is raised is a defect."""
    try:
        return read("x", datatype, shape, data)
    except ServiceError as error:
        if error.kind is not FaultKind.INVALID:
            raise
        return None


@given(st.sampled_from(sorted(NUMPY)), st.lists(st.integers(-2, 5), max_size=4), st.binary(max_size=64))
def test_any_bytes_are_read_or_refused_as_the_clients_fault(datatype, shape, raw):
    tensor = read_or_refused(from_raw, datatype, shape, memoryview(raw))
    assert tensor is None or to_raw(tensor) == raw or datatype == "BF16"


@given(st.sampled_from(sorted(NUMPY)), st.lists(st.integers(-2, 5), max_size=4), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
))  # fmt: skip
def test_any_json_is_read_or_refused_as_the_clients_fault(datatype, shape, content):
    tensor = read_or_refused(from_json, datatype, shape, json.dumps(content).encode())
    assert tensor is None or list(tensor.shape) == shape


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "said"),
    [
        ("INT8", (1,), b"[128]", "outside the range of INT8"),
        ("UINT8", (1,), b"[-1]", "outside the range of UINT8"),
        ("INT64", (2,), b"[1]", "got 1 elements, expected 2"),
        ("INT64", (1,), b"[1.5]", "no INT64"),
        ("INT64", (1,), b"[true]", "no INT64"),
        ("BOOL", (1,), b"[1]", "no BOOL"),
        ("INT64", (2, 2), b"[[1,2],[3]]", "other lengths"),
        ("BF16", (1,), b"[1]", "binary data"),
        ("INT65", (1,), b"[1]", "unknown datatype 'INT65'"),
        ("INT64", (-1,), b"[1]", "negative size"),
        ("INT64", (1,) * 17, b"[1]", "17 dimensions"),
        ("INT64", (1 << 62, 0), b"[]", "that no tensor can have"),
        ("FP32", (1,), b"[" * 5000, "no FP32"),
    ],
)
def test_malformed_json_tensors_are_refused_with_a_reason(datatype, shape, data, said):
    with pytest.raises(ServiceError, match=said.replace("[", r"\[")):
        from_json("x", datatype, shape, data)


@pytest.mark.parametrize(
    ("datatype", "shape", "raw", "said"),
    [
        ("INT64", (1,), bytes(7), "got 7 bytes, expected 8"),
        ("INT64", (1 << 62, 1 << 62), bytes(8), "got 8 bytes"),
        ("BOOL", (2,), b"\x00\x02", "0 or 1, got 2"),
        ("BYTES", (1,), b"\x05\x00\x00\x00abc", "element 0 has 5 bytes"),
        ("BYTES", (2,), b"\x03\x00\x00\x00abc", "cannot hold 2 elements"),
        ("BYTES", (1,), b"\x01\x00\x00\x00abc", "2 bytes are left"),
        ("INT64", (0, 1 << 40, 1 << 40), b"", "that no tensor can have"),
        ("BYTES", (1 << 60,), b"\x01\x00\x00\x00a", "cannot hold"),
    ],
)
def test_malformed_binary_tensors_are_refused_with_a_reason(datatype, shape, raw, said):
    with pytest.raises(ServiceError, match=said):
        from_raw("x", datatype, shape, memoryview(raw))
