"""Every error that batchmaker raises on purpose.

    BatchmakerError
    ├── ModelError              the model, a cell or a saved directory is wrong
    │   ├── HandleError         an unfold function used a handle as if it were the value (also an AttributeError)
    │   ├── ShapeError          a value has another shape or dtype than its input declares
    │   └── SavedModelError     a saved model cannot be read or is refused
    ├── RequestError            this request is wrong or failed; others are not touched
    │   ├── InvalidRequestError what the caller sent cannot be unfolded
    │   │   └── RequestShapeError  data of the request has another shape or dtype than declared (also a ShapeError)
    │   ├── NodeLimitError      the unfold function made more nodes than allowed
    │   ├── CellError           a cell raised while it computed this request
    │   ├── DeadlineError       the deadline passed before the last cell was done
    │   │   └── RefusedError    it could not be met, so nothing was computed
    │   ├── CancelledError      the caller gave the request up
    │   ├── QueueFullError      the engine has as many unanswered requests as it takes
    │   └── SequenceError       the request's sequence has ended, or a chunk before it failed
    │       └── SequenceLimitError  no more sequences can be open at once
    ├── DataError               a file of data is missing or malformed
    │   └── PolicyFileError     a learned policy cannot be read, or is for another model or version
    ├── OptionError             an option, policy or model name is not known
    ├── DeviceError             a device, its driver or its compiler is missing or failed
    ├── StoppedError            the engine takes no more requests
    └── InvariantError          the scheduler's own books do not balance: a defect

Messages say where, what came, what was wanted and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

RAISED_BY_USERS: Final = BaseException
"""What code of the engine's users may raise: unfold functions, cells, stop tests, observers, callbacks.

SystemExit, KeyboardInterrupt and GeneratorExit as well: whoever calls such code in the engine's threads catches all of
it, and it is that request's failure. Python hands Ctrl-C to the main thread alone, which none of these is.
"""


class BatchmakerError(Exception):
    """Anything that batchmaker raises on purpose."""


class ModelError(BatchmakerError):
    """The model, one of its cells or its directory is wrong."""


class HandleError(ModelError, AttributeError):
    """An unfold function used a handle as if it were the value, which no cell has computed yet."""


class ShapeError(ModelError):
    """A value has another shape or dtype than the input that it feeds declares."""


class SavedModelError(ModelError):
    """A saved model cannot be read, or is refused because it is not what it says."""


class RequestError(BatchmakerError):
    """One request is wrong or failed; every other request goes on."""


class InvalidRequestError(RequestError):
    """What the caller sent cannot be unfolded into cells."""


class RequestShapeError(InvalidRequestError, ShapeError):
    """Data that came with the request has another shape or dtype than the input that it feeds declares."""


class NodeLimitError(RequestError):
    """The unfold function made more nodes than one request may have."""


class CellError(RequestError):
    """A cell raised while it computed a batch that this request was part of."""


class DeadlineError(RequestError):
    """The request's deadline passed before its last cell was done."""


class RefusedError(DeadlineError):
    """The request's deadline could not be met any more, so it was turned away before anything was computed."""


class CancelledError(RequestError):
    """The caller gave the request up before it was answered."""


class QueueFullError(RequestError):
    """As many requests are accepted and not answered as the engine takes (`max_queue`), so this one was not."""


class SequenceError(RequestError):
    """The sequence that the request is a chunk of has ended, or one of its chunks before this one has no result."""


class SequenceLimitError(SequenceError):
    """So many sequences are open that no other may begin."""


class DataError(BatchmakerError):
    """A data file is missing or malformed."""


class PolicyFileError(DataError):
    """A learned policy's file cannot be read, or is refused: it is for another model, or of another version."""


class OptionError(BatchmakerError):
    """An option, policy or model name is not known, or its value is not allowed."""


class DeviceError(BatchmakerError):
    """A device, its driver or its compiler is missing, too old, or could not do what was asked of it."""


class StoppedError(BatchmakerError):
    """The engine has been stopped and takes no more requests."""


class InvariantError(BatchmakerError):
    """The scheduler's own books do not balance. Always a defect in batchmaker."""


def said_by(error: BaseException) -> str:
    """Return an error's class and message; the class alone where there is no message or its `__str__` raises."""
    try:
        message = str(error)
    except RAISED_BY_USERS:
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def unknown_name(kind: str, name: str, known: Iterable[str]) -> OptionError:
    """Return the error for a name that is not known, with the nearest one that is."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return OptionError(f"unknown {kind} {name!r}; known: {', '.join(names)}.{hint}")
