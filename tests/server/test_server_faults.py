"""What clients hear of the engine's errors: whose fault it was, and nothing of the inside."""

from __future__ import annotations

import pytest

from batchmaker.errors import (
    CancelledError,
    CellError,
    DeadlineError,
    InvalidRequestError,
    NodeLimitError,
    RefusedError,
    SequenceError,
    SequenceLimitError,
    StoppedError,
)
from batchmaker.server.faults import FaultKind, ServiceError, fault_of


@pytest.mark.parametrize(
    ("error", "kind", "retry_after_s"),
    [
        (InvalidRequestError, FaultKind.INVALID, None),
        (NodeLimitError, FaultKind.INVALID, None),
        (SequenceError, FaultKind.INVALID, None),
        (SequenceLimitError, FaultKind.UNAVAILABLE, 1.0),
        (DeadlineError, FaultKind.DEADLINE, None),
        (RefusedError, FaultKind.UNAVAILABLE, 1.0),
        (CancelledError, FaultKind.CANCELLED, None),
        (CellError, FaultKind.INTERNAL, None),
        (StoppedError, FaultKind.UNAVAILABLE, 1.0),
        (RuntimeError, FaultKind.INTERNAL, None),
    ],
)
def test_every_error_has_its_kind(error, kind, retry_after_s):
    fault = fault_of(error("x" * 8))
    assert (fault.kind, fault.retry_after_s) == (kind, retry_after_s)


@pytest.mark.parametrize("error", [CellError, SequenceError, RuntimeError])
def test_what_the_inside_said_stays_inside(error):
    assert "secret" not in str(fault_of(error("a secret of the inside")))


def test_a_message_that_quotes_the_model_is_left_out():
    error = InvalidRequestError("Model.unfold raised KeyError: 'a secret of the inside'")
    error.__cause__ = KeyError("a secret of the inside")
    assert "secret" not in str(fault_of(error))


def test_the_line_of_the_model_that_an_error_names_is_left_out():
    for line in ("", "request 7: "):
        error = InvalidRequestError(
            f"{line}model.py:12, `return bm.switch(secret, [a, {{1: b}}])`: switch has 2: got 3"
        )
        assert str(fault_of(error)) == f"{line}switch has 2: got 3"
    assert (
        str(fault_of(InvalidRequestError("request 7: `switch` got index 3: 2"))) == "request 7: `switch` got index 3: 2"
    )


def test_a_fault_is_told_as_it_is():
    fault = ServiceError(FaultKind.TOO_MANY, "slow down", 2.5)
    assert fault_of(fault) is fault
    assert fault.retry_after == 3
