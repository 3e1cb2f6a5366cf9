"""Whether the weights of served cells are still those that the cells were bound with.

A bound cell holds copies of some of its weights, such as those that are packed for its products, and reads others where
they are. If somebody changes the weights meanwhile, as training does, it would compute with some old and some new ones.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Final, final

from torch import Tensor, nn

from batchmaker.errors import ModelError

version_of: Final = attrgetter("_version")
"""How often torch has counted a change of a tensor."""


@final
class WatchedWeights:
    """The weights of bound cells.

    found: all of them, and the sum of how often torch had counted a change of each when its cell was bound. It grows
    with each change: `sum(map(version_of, tensors)) != total` tells of one without a look at each.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[str, Tensor, int]] = {}
        self.found: tuple[tuple[Tensor, ...], int] = ((), 0)

    def add(self, name: str, module: nn.Module) -> None:
        """Add those of a cell that was bound now."""
        for weight in (*module.parameters(), *module.buffers()):
            if not weight.is_inference():  # torch counts no changes of these
                self._by_id.setdefault(id(weight), (name, weight, version_of(weight)))
        known = self._by_id.values()
        self.found = tuple([weight for _, weight, _ in known]), sum([version for _, _, version in known])

    def changed(self) -> ModelError:
        """Return the error of requests that come after a weight has changed."""
        changed = [name for name, weight, version in list(self._by_id.values()) if version_of(weight) != version]
        return ModelError(
            f"cell {changed[0]!r}: its weights have changed since they were read, at its first use, and some would be "
            "new and some old. Make a new model and engine for new weights; of a network that is trained meanwhile, "
            "serve a copy (copy.deepcopy)."
        )
