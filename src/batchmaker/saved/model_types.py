"""Networks of other libraries: the loader of each `model_type` that a config.json may name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from torch import Tensor

from batchmaker.model.model import Model

Loader = Callable[[Mapping[str, Any], Mapping[str, Tensor]], Model]
"""Takes config.json, and the weights by name; returns the model. Raises ModelError if they are of another network."""

LOADERS: dict[str, str] = {
    "mamba": "batchmaker.lab.zoo.mamba:MambaModel.of_weights",
    "rwkv": "batchmaker.lab.zoo.rwkv:RwkvModel.of_weights",
}
"""Where the loader of each model_type is: "package.module:function", imported at the first use."""


def loader_of(model_type: str) -> Loader | None:
    """Return the loader of a model_type; None if there is none."""
    home = LOADERS.get(model_type)
    if home is None:
        return None
    module, _, name = home.partition(":")
    loader: Loader = attrgetter(name)(importlib.import_module(module))
    return loader
