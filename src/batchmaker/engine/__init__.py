"""The live driver: requests in, answers out, one loop around the scheduler."""

from batchmaker.engine.answer import Answer
from batchmaker.engine.driver import DriverStats, StepSeen
from batchmaker.engine.engine import Engine
from batchmaker.engine.sequence import Sequence
from batchmaker.engine.service import ServiceStats
from batchmaker.engine.ticket import Ticket

__all__ = ["Answer", "DriverStats", "Engine", "Sequence", "ServiceStats", "StepSeen", "Ticket"]
