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


def annotated_floats(module: nn.Module) -> set[int]:
    """Return the numbers of the inputs that forward() annotates as floats, such as `temperature: float`."""
    if isinstance(module, torch.jit.ScriptModule):
        return set()
    floats = (float, torch.FloatTensor, torch.DoubleTensor, torch.HalfTensor, torch.BFloat16Tensor)
    names = {"float", *[f"torch.{kind.__name__}" for kind in floats[1:]]}
    parameters = enumerate(inspect.signature(module.forward).parameters.values())
    return {port for port, one in parameters if one.annotation in floats or one.annotation in names}
