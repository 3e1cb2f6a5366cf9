"""The parameters of a module's forward(), even if it is not a Python function."""

from __future__ import annotations

import inspect

import torch
from torch import nn


def signature_of(module: nn.Module) -> inspect.Signature:
    """Return the signature of forward(), also for TorchScript, where `inspect` finds none."""
    if not isinstance(module, torch.jit.ScriptModule):
        return inspect.signature(module.forward)
    arguments = module._c._get_method("forward").schema.arguments[1:]
    return inspect.Signature(
        [
            inspect.Parameter(
                argument.name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=argument.default_value if argument.has_default_value() else inspect.Parameter.empty,
            )
            for argument in arguments
        ]
    )
