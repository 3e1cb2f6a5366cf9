"""JSON is read in pieces that are short whatever is in it, and what is wrong is refused before it costs anything."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from batchmaker.server.faults import FaultKind, ServiceError
from batchmaker.server.formats import json_tensors
from batchmaker.server.formats.generate_body import read_generate
from batchmaker.server.formats.infer_body import read_infer
from batchmaker.server.formats.json_tensors import PIECE_BYTES, read_json
from batchmaker.server.formats.pieces import PieceQueue, at_once
from batchmaker.server.formats.signature import Signature, TensorSpec
from batchmaker.server.limits import Limits
from insides import listen_to_decoding

NUMBERS = TensorSpec("numbers", "FP32", (-1,))
WORDS = TensorSpec("words", "BYTES", (-1,))
SIGNATURE = Signature((NUMBERS, WORDS), (TensorSpec("out", "FP32", (1,)),))
SLOW = b"2.2250738585072011123e-308,"
"""A number that takes a parser a hundred times as long as others."""

MANY = 1 << 20


@pytest.fixture
def decoded(monkeypatch):
    """The lengths of the texts of elements that are made into objects at once."""
    lengths = []
    listen_to_decoding(monkeypatch, lambda text: lengths.append(len(text)))
    return lengths


def any_shape(shape):
    pass


def generate(body):
    return at_once(read_generate(body, SIGNATURE, Limits()))


def infer(body):
    return at_once(read_infer(body, None, SIGNATURE, Limits()))


@given(
    hnp.arrays(np.float64, hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4)),
    st.sampled_from([None, 1, "\t"]),
)
def test_lists_tell_their_shape_however_they_are_written(array, indent):
    array = np.nan_to_num(array, posinf=0.0, neginf=0.0)
    data = json.dumps(array.tolist(), indent=indent).encode()
    read = at_once(read_json("x", "FP64", None, data, any_shape))
    first_empty = array.shape.index(0) + 1 if 0 in array.shape else array.ndim
    assert read.shape == array.shape[:first_empty]  # what is in an empty list has no shape
    assert np.array_equal(read.data.reshape(-1), array.reshape(-1))


@given(
    st.sampled_from(["INT64", "FP32", "BOOL", "BYTES"]),
    st.lists(st.integers(0, 4), max_size=3),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    ),
)
def test_small_pieces_read_the_same_as_large_ones(datatype, shape, content):
    data = json.dumps(content).encode()

    def outcome(size):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(json_tensors, "PIECE_BYTES", size)
            try:
                read = at_once(read_json("x", datatype, shape, data, any_shape))
            except ServiceError as error:
                return error.kind
            return read.shape, read.data.tolist()

    read = outcome(PIECE_BYTES)
    assert outcome(1) == outcome(5) == read
    assert read is FaultKind.INVALID or list(read[0]) == shape


@pytest.mark.parametrize("separator", [b",", b" ,\n "])
def test_no_piece_is_long_though_the_numbers_are(decoded, separator):
    count = 90_000
    text = b"[" + separator.join([SLOW[:-1]] * count) + b"]"
    (tensor,) = generate(b'{"numbers": %s}' % text).inputs
    assert tensor.shape == (count,)
    assert max(decoded) < PIECE_BYTES + 100
    assert len(decoded) > count * len(SLOW) // PIECE_BYTES


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"[" + b"1," * MANY + b"1]", "is more than 100000"),
        (b"[" + SLOW * MANY + b"1]", "is more than 100000"),
        (b"[" + b"[1]," * MANY + b"[1]]", r"expected \[-1\]"),
        (b"[" + b"[1]," * MANY + b"[[1]]]", r"expected \[-1\]|other lengths"),
        (b"[" * MANY + b"]" * MANY, "nested too deeply"),
        (b"[" * 900 + b"]" * 900, "900 dimensions"),
    ],
    ids=["many numbers", "many slow numbers", "lists of one", "lists of one and one more", "nested", "less nested"],
)
def test_numbers_of_a_shape_that_the_model_does_not_take_are_not_read(decoded, text, said):
    with pytest.raises(ServiceError, match=said):
        generate(b'{"numbers": %s}' % text)
    with pytest.raises(ServiceError):
        infer(b'{"inputs": [{"name": "numbers", "datatype": "FP32", "shape": [%d], "data": %s}]}' % (MANY + 1, text))
    assert decoded == []


@pytest.mark.parametrize("text", [b"[" + b'"",' * MANY + b'""]', b"[" + b'["a"],' * MANY + b'["a"]]'])
def test_strings_are_counted_before_they_are_made(decoded, text):
    with pytest.raises(ServiceError, match="more than 250000 strings"):
        generate(b'{"words": %s}' % text)
    assert decoded == []


def test_quotation_marks_in_a_string_are_no_strings():
    (tensor,) = generate(b'{"words": ["%s"]}' % (b'\\"' * MANY)).inputs
    assert tensor.data.tolist() == [b'"' * MANY]


def test_lists_of_strings_are_counted_too():
    with pytest.raises(ServiceError, match="more than 20000 lists"):
        generate(b'{"words": [%s]}' % b",".join([b'["a"]'] * 30_000))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"inputs": [%s]}' % b",".join([b'{"name": "numbers", "shape": [1], "datatype": "FP32"}'] * MANY), "64 inp"),
        (b'{"inputs": [], "outputs": [%s]}' % b",".join([b'{"name": "out"}'] * MANY), r"\$.outputs` has"),
        (b'{"inputs": [], "parameters": {%s}}' % b",".join([b'"a": %s' % SLOW[:-1]] * MANY), r"\$.parameters` has"),
        (b'{"inputs": [{"name": "numbers", "datatype": "FP32", "shape": [%s]}]}'
         % b",".join([b"1"] * MANY), "shape` has"),
        (b'{"inputs": [{"name": "%s", "datatype": "FP32", "shape": []}]}' % (b"n" * MANY), "length <= 256"),
        (b'{"inputs": [{"name": "words", "shape": [], "datatype": "FP32", "parameters": {%s}}]}'
         % b",".join([b'"a": 1'] * MANY), r"\$.inputs\[0\].parameters` has"),
    ],
)  # fmt: skip
def test_what_stands_beside_the_data_is_small(body, said):
    with pytest.raises(ServiceError, match=said) as caught:
        infer(body)
    assert caught.value.kind is FaultKind.INVALID
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"number": [1]}', "unknown key 'number'.*Did you mean 'numbers'"),
        (b'{"%s": [1]}' % (b"n" * MANY), "unknown key 'n{64}'"),
        (b'{"parameters": {%s}}' % b",".join([b'"a": %s' % SLOW[:-1]] * MANY), r"\$.parameters` has"),
    ],
)
def test_what_is_no_input_is_refused_in_few_words(body, said):
    with pytest.raises(ServiceError, match=said) as caught:
        generate(body)
    assert len(str(caught.value)) < 1000


# --- numbers that do not fit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("datatype", "number"),
    [
        ("FP32", "1e39"), ("FP32", "-1e39"), ("FP32", "3.4028235677973366e38"), ("FP16", "70000"), ("FP64", "1e400"),
        ("INT64", str(2**63)), ("INT64", "-9223372036854775809"), ("INT64", "3.0"), ("INT64", "1e2"),
        ("UINT8", "300"), ("UINT8", "-1"), ("UINT64", "-1"), ("UINT64", str(2**64)), ("INT8", "128"),
        ("INT64", "9" * 400), ("FP32", "9" * 400), ("INT32", "true"), ("BOOL", "1"), ("FP32", "null"),
    ],
)  # fmt: skip
def test_a_number_that_does_not_fit_its_datatype_is_refused(datatype, number):
    with pytest.raises(ServiceError, match=r"outside the range|out of range|no " + datatype):
        at_once(read_json("x", datatype, (2,), f"[0,{number}]".encode(), any_shape))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_no_finite_number_becomes_infinite(number):
    try:
        read = at_once(read_json("x", "FP32", (1,), json.dumps([number]).encode(), any_shape))
    except ServiceError:
        assert abs(number) > 3e38
    else:
        assert np.isfinite(read.data).all()


# --- turns ------------------------------------------------------------------------------------------------------------


def work(name, pieces, log):
    """Work of so many pieces that notes each of them, and returns its name."""
    for number in range(pieces):
        log.append(f"{name}{number}")
        if number < pieces - 1:
            yield
    return name


def test_pieces_of_several_works_take_turns_with_each_other_and_with_everything_else():
    async def main():
        log, turns = [], PieceQueue()

        async def others():
            for _ in range(3):
                log.append("-")
                await asyncio.sleep(0)

        await asyncio.gather(turns.finish(work("a", 4, log)), turns.finish(work("b", 2, log)), others())
        return log

    log = asyncio.run(main())
    assert [entry for entry in log if entry != "-"] == ["a0", "b0", "a1", "b1", "a2", "a3"]
    assert log.index("a3") > max(at for at, entry in enumerate(log) if entry == "-")


def test_work_of_one_piece_needs_no_turn_of_the_loop():
    async def main():
        task = asyncio.ensure_future(PieceQueue().finish(work("a", 1, [])))
        await asyncio.sleep(0)
        return task.result()

    assert asyncio.run(main()) == "a"


def test_work_that_fails_or_is_cancelled_lets_others_go_on():
    async def main():
        turns, log = PieceQueue(), []

        def failing():
            yield
            raise ValueError("wrong")

        cancelled = asyncio.ensure_future(turns.finish(work("c", 9, log)))
        results = asyncio.gather(
            turns.finish(failing()), turns.finish(work("a", 3, log)), cancelled, return_exceptions=True
        )
        await asyncio.sleep(0)
        cancelled.cancel()
        return await results, log

    (wrong, done, gone), log = asyncio.run(main())
    assert isinstance(wrong, ValueError)
    assert done == "a"
    assert isinstance(gone, asyncio.CancelledError)
    assert "c8" not in log
