"""An inference request and its response, independent of the protocol."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from batchmaker.server.formats.tensors import Tensor

Parameter = bool | int | float | str | None


class WantedOutput(msgspec.Struct, frozen=True):
    """An output that the client names. binary: its form; None leaves that to the whole request."""

    name: str
    binary: bool | None = None


class InferRequest(msgspec.Struct, frozen=True):
    """A client's request to a model. outputs: empty for all. parameters: the client's, reserved ones included."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[WantedOutput, ...] = ()
    id: str = ""
    parameters: Mapping[str, Parameter] = {}


class InferResponse(msgspec.Struct, frozen=True):
    """A model's response: the requested outputs in order, or one part of a stream.

    single: names of outputs that are one value, and not a list of length one. parameters: beside the outputs.
    """

    model: str
    version: str
    outputs: tuple[Tensor, ...]
    id: str = ""
    single: frozenset[str] = frozenset()
    parameters: Mapping[str, Parameter] = {}
