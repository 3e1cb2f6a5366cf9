"""Every error that batchmaker raises on purpose.

    BatchmakerError
    ├── ModelError              the model, a cell or a saved directory is wrong
    │   ├── HandleError         an unfold function used a handle as if it were the value (also an AttributeError)
    │   ├── RowsError           the rows of a cell depend on each other, or on earlier calls
    │   ├── ShapeError          a value has another shape or dtype than its input declares
    │   └── SavedModelError     a saved model cannot be read or is refused
    ├── RequestError            this request is wrong or failed; others are not touched
    │   ├── InvalidRequestError what the caller sent cannot be unfolded
    │   │   └── RequestShapeError  data of the request has another shape or dtype than declared (also a ShapeError)
    │   ├── NodeLimitError      the unfold function made more nodes than allowed
    │   ├── MemoryLimitError    its values do not fit into memory
    │   ├── CellError           a cell raised while it computed this request
    │   ├── DeadlineError       the deadline passed before the last cell was done
    │   │   └── RefusedError    it could not be met, so nothing was computed
    │   ├── CancelledError      the caller gave the request up
    │   ├── EngineError         the engine failed while it was in flight, and has begun anew: a defect
    │   ├── QueueFullError      the engine has as many unanswered requests as it takes
    │   └── SequenceError       the request's sequence has ended, or a chunk before it failed
    │       ├── SequenceLimitError  no more sequences can be open at once
    │       └── SequenceStateError  a state cannot be moved, or nothing can go on from it here
    ├── DataError               a file of data is missing or malformed
    │   └── PolicyFileError     a learned policy cannot be read, or is for another model or version
    ├── OptionError             an option, policy or model name is not known
    │   └── MissingExtraError   packages of an extra are not installed (also an ImportError)
    ├── DeviceError             a device, its driver or its compiler is missing or failed
    ├── StoppedError            the engine takes no more requests
    └── InvariantError          the scheduler's state contradicts itself: a defect

Messages say where, what came, what was wanted and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

RAISED_BY_USERS: Final = BaseException
"""Every exception that user code may raise: unfold functions, cells, stop tests, observers, callbacks.

SystemExit, KeyboardInterrupt and GeneratorExit are included. Callers of such code in the engine's threads catch all of
them, and the exception is that request's failure. Python delivers Ctrl-C to the main thread only, which is none of
these.
"""


class BatchmakerError(Exception):
    """Anything that batchmaker raises on purpose."""


class ModelError(BatchmakerError):
    """The model, one of its cells or its directory is wrong."""


class HandleError(ModelError, AttributeError):
    """An unfold function used a handle like its value, which no cell has computed yet."""


class RowsError(ModelError):
    """The rows of a cell depend on each other, or on earlier calls."""


class ShapeError(ModelError):
    """A value has another shape or dtype than declared by the input that reads it."""


class SavedModelError(ModelError):
    """A saved model cannot be read, or is refused because its content is not as declared."""


class RequestError(BatchmakerError):
    """One request is wrong or failed; every other request goes on."""


class InvalidRequestError(RequestError):
    """The caller's request cannot be unfolded into cells."""


class RequestShapeError(InvalidRequestError, ShapeError):
    """Data of the request has another shape or dtype than declared by the input that reads it."""


class NodeLimitError(RequestError):
    """The unfold function made more nodes than one request may have."""


class MemoryLimitError(RequestError):
    """There is not enough memory for the values of the request."""


class CellError(RequestError):
    """A cell raised while it computed a batch that this request was part of."""


class DeadlineError(RequestError):
    """The request's deadline passed before its last cell was done."""


class RefusedError(DeadlineError):
    """The request's deadline could not be met any more, so it was refused before anything was computed."""


class CancelledError(RequestError):
    """The caller gave the request up before it was answered."""


class EngineError(RequestError):
    """The engine failed while the request was in flight, for another reason, and has begun anew. It may be sent again.

    Always a defect, in batchmaker or in a policy.
    """


class QueueFullError(RequestError):
    """The engine has as many unanswered requests as it accepts (`max_queue`), so this one was refused."""


class SequenceError(RequestError):
    """The sequence of the chunk has ended, or an earlier chunk has no result."""


class SequenceLimitError(SequenceError):
    """The number of open sequences has reached the limit."""


class SequenceStateError(SequenceError):
    """The state of a sequence cannot be moved; or its bytes are damaged, or of another model."""


class DataError(BatchmakerError):
    """A data file is missing or malformed."""


class PolicyFileError(DataError):
    """A learned policy's file cannot be read, or is refused: it is for another model, or of another version."""


class OptionError(BatchmakerError):
    """An option, policy or model name is not known, or its value is not allowed."""


class MissingExtraError(OptionError, ImportError):
    """Packages of an extra are not installed. The message ends with the command that installs them."""


class DeviceError(BatchmakerError):
    """A device, its driver or its compiler is missing or too old, or could not do its work."""


class StoppedError(BatchmakerError):
    """The engine has been stopped and takes no more requests."""


class InvariantError(BatchmakerError):
    """The scheduler's state contradicts itself. Always a defect in batchmaker."""


def said_by(error: BaseException) -> str:
    """Return an error's class and message; the class alone if there is no message or its `__str__` raises."""
    try:
        message = str(error)
    except RAISED_BY_USERS:
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def lacks_memory(error: BaseException) -> bool:
    """Whether an exception says that memory could not be taken: Python's and NumPy's, and torch's on every device."""
    if isinstance(error, MemoryError):
        return True
    # torch.OutOfMemoryError is a RuntimeError, and on the CPU torch raises a bare one. This file does not import torch.
    return isinstance(error, RuntimeError) and (
        type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in said_by(error)
    )


@contextmanager
def needing(extra: str, what: str, kind: type[BatchmakerError] = MissingExtraError) -> Iterator[None]:
    """Let a block import packages of an extra. If one is missing, raise the error that says how to install them.

    what: what needs them, as the begin of a sentence. kind: the error's class. Around a block with the same in it, the
    outer one is told: its extra brings the inner one. An import that fails inside this package is a defect, and stays
    an ImportError.
    """
    try:
        yield
    except ImportError as error:
        missing = error.__cause__ if isinstance(error, MissingExtraError) else error
        if not isinstance(error, MissingExtraError) and (error.name or "").partition(".")[0] == "batchmaker":
            raise
        said = f"{what} needs packages that are not installed ({missing}): pip install 'batchmaker[{extra}]'"
        raise kind(said) from missing


def unknown_name(kind: str, name: str, names: Iterable[str]) -> OptionError:
    """Return the error for an unknown name, with the nearest known one."""
    listed = sorted(names)
    return OptionError(f"unknown {kind} {name!r}; known: {', '.join(listed)}.{nearest_name(name, listed)}")


def nearest_name(name: str, names: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest known one, or nothing if none is near."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
