"""Parameters of requests: what is taken, and what is said of a wrong one, whichever way it came."""

from __future__ import annotations

import json
import math

import pytest

from batchmaker.server.faults import FaultKind, ServiceError
from batchmaker.server.formats.chunk_form import ChunkForm
from batchmaker.server.formats.generate_body import read_generate
from batchmaker.server.formats.infer_body import read_infer
from batchmaker.server.formats.parameters import DAY_S, call_options
from batchmaker.server.formats.pieces import at_once
from batchmaker.server.formats.signature import Signature, TensorSpec
from batchmaker.server.limits import Limits

SIGNATURE = Signature((TensorSpec("x", "INT64", (-1,)),), (TensorSpec("y", "INT64", (-1,)),))
NO_DEADLINE = [0, -1, -0.0, math.nan, math.inf, -math.inf, 1e3 * DAY_S + 1, 10**4299, True, False, "", "5", "soon"]


def said_of(parameters):
    with pytest.raises(ServiceError) as caught:
        call_options(parameters)
    assert caught.value.kind is FaultKind.INVALID
    return str(caught.value)


@pytest.mark.parametrize("wrong", NO_DEADLINE)
def test_a_deadline_is_a_number_above_0_and_within_a_day(wrong):
    said = said_of({"deadline_ms": wrong})
    assert "'deadline_ms' must be a number of milliseconds above 0 and within a day, got" in said
    assert "without it, the request has no deadline of its own" in said


@pytest.mark.parametrize("wrong", [value for value in NO_DEADLINE if value != 0 or value is False])
def test_a_timeout_is_refused_as_a_deadline_is(wrong):
    wrong = 1e6 * DAY_S + 1 if wrong == 1e3 * DAY_S + 1 else wrong
    assert "'timeout' must be a number of microseconds above 0 and within a day, got" in said_of({"timeout": wrong})


def test_a_timeout_of_0_is_none_as_in_triton():
    assert call_options({"timeout": 0}).deadline_ms is None
    assert call_options({"timeout": 0, "deadline_ms": 5}).deadline_ms == 5


def test_the_longest_deadline_is_a_day():
    assert call_options({"deadline_ms": 1e3 * DAY_S}).deadline_ms == 1e3 * DAY_S
    assert call_options({"timeout": 86_400_000_000}).deadline_ms == 1e3 * DAY_S


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "-inf", "1e999", "soon", ""])
def test_the_query_of_a_connection_takes_no_other_deadlines_than_a_request(text):
    with pytest.raises(ServiceError, match=r"deadline_ms.* must be a number.*, got") as caught:
        ChunkForm(SIGNATURE, {"deadline_ms": text})
    assert caught.value.kind is FaultKind.INVALID


def test_a_chunk_can_do_without_the_deadline_of_its_connection():
    form = ChunkForm(SIGNATURE, {"deadline_ms": "50"})
    chunk = json.dumps({"x": [1], "parameters": {"deadline_ms": None}})
    assert call_options(form.read(chunk).parameters).deadline_ms is None


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "9" * 5000])
@pytest.mark.parametrize("name", ["deadline_ms", "timeout"])
def test_a_number_that_json_does_not_have_is_no_deadline(name, number):
    parameters = f'"parameters": {{"{name}": {number}}}'
    for read in (
        lambda: read_generate(f'{{"x": [1], {parameters}}}'.encode(), SIGNATURE, Limits()),
        lambda: read_infer(f'{{"inputs": [], {parameters}}}'.encode(), None, SIGNATURE, Limits()),
    ):
        with pytest.raises(ServiceError, match="not the JSON expected here") as caught:
            at_once(read())
        assert caught.value.kind is FaultKind.INVALID


@pytest.mark.parametrize("name", ["deadline_ms", "timeout", "priority", "sequence_id", "sequence_start"])
def test_of_a_long_wrong_value_only_the_beginning_is_said(name):
    said = said_of({"sequence_id": 1, name: "x" * 60_000})
    assert f"got '{'x' * 39}..." in said
    assert len(said) < 300


def test_flags_in_messages_are_written_as_in_json():
    assert "got true;" in said_of({"deadline_ms": True})
    assert said_of({"priority": False}).endswith("got false")
