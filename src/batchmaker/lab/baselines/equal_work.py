"""Graph batching with the cells of cellular batching, so that only the choice of who runs together differs."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, final

from batchmaker.engine.engine import Engine
from batchmaker.errors import ModelError
from batchmaker.model.model import Model


@final
class EqualWorkModel(Model):
    """A model whose whole requests are computed by the bound cells of an engine of its own.

    A batch begins when its worker takes it and is answered when its last request is done, as in all graph batching.
    Inside it the cells are those that the engine runs for `cellular`: folded, hoisted, planned if they ask for it, in
    compiled loops; and a request that has ended is not computed any more, so nothing is padded. What the engine needs
    beside its cells is paid by both. Models without a padded form, such as trees, can be batched like this too.

    model: any model. threads: compute threads. One batch at a time: for one worker. Use as a context manager.
    """

    def __init__(self, model: Model, *, threads: int = 1) -> None:
        self._lengths = model.length
        self._engine = Engine(model, "cellular", threads=threads)

    def __enter__(self) -> EqualWorkModel:
        self._engine.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.stop()

    def unfold(self, request: Any) -> Any:
        """Raise ModelError: whole requests are computed by `batched`."""
        raise ModelError("an EqualWorkModel computes whole requests: use a policy that batches them, such as `padded`")

    def batched(self, requests: Sequence[Any]) -> list[Any]:
        """Return the results of requests that begin together, in order. Raises the first error of a request."""
        return self._engine.map(requests, progress=False, max_in_flight=max(1, len(requests)))

    def length(self, request: Any) -> int:
        """Return the model's own length of a request."""
        return self._lengths(request)
