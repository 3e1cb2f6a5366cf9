"""The live engine: takes requests, runs them with the scheduler on an executor, and answers. `Engine` is the entry."""

from batchmaker.engine.answer import Answer
from batchmaker.engine.engine import Engine
from batchmaker.engine.request import Ticket
from batchmaker.engine.sequence import Sequence
from batchmaker.engine.stats import DriverStats, ServiceStats, StepSeen, StepsSeen

__all__ = ["Answer", "DriverStats", "Engine", "Sequence", "ServiceStats", "StepSeen", "StepsSeen", "Ticket"]
