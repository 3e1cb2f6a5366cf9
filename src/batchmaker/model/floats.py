"""Which integers that come with a request are floats for a module: Python writes 1 for 1.0."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations, islice
from typing import Final, final

from torch import nn

from batchmaker.compile.export import flat_module, infer_outputs
from batchmaker.compile.forward_signature import annotated_floats
from batchmaker.compile.row_trial import TrialRows
from batchmaker.errors import ModelError
from batchmaker.graph.spec import ValueSpec

Specs = tuple[ValueSpec, ...]

_MAX_TRIES: Final = 64


@final
@dataclass(frozen=True, slots=True)
class Floats:
    """Finds the inputs of a module that are floats though integers were given.

    dtype: of the floats. trial: what the module is tried with.
    """

    module: nn.Module
    dtype: str
    trial: TrialRows

    def annotated(self, inputs: Specs, ports: Sequence[int]) -> Specs:
        """Return the specs with floats where the parameters of forward() say so."""
        floats = annotated_floats(self.module)
        return self._changed(inputs, [port for port in _integers(inputs, ports) if port in floats])

    def needed(self, inputs: Specs, ports: Sequence[int]) -> Specs | None:
        """Return the specs with the fewest floats with which the module runs; None if it runs with none."""
        integers = _integers(inputs, ports)
        choices = chain.from_iterable(combinations(integers, count) for count in range(1, len(integers) + 1))
        candidates = [self._changed(inputs, choice) for choice in islice(choices, _MAX_TRIES)]
        return next(filter(self._runs, candidates), None)

    def _changed(self, inputs: Specs, ports: Sequence[int]) -> Specs:
        return tuple(
            [dataclasses.replace(spec, dtype=self.dtype) if port in ports else spec for port, spec in enumerate(inputs)]
        )

    def _runs(self, inputs: Specs) -> bool:
        batches = [self.trial.batch(inputs, num_rows) for num_rows in self.trial.sizes()[:1]]
        try:
            infer_outputs(flat_module(self.module), inputs, "", batches)
        except ModelError:
            return False
        return True


def _integers(inputs: Specs, ports: Sequence[int]) -> list[int]:
    return [port for port in ports if port < len(inputs) and inputs[port].dtype == "int64"]
