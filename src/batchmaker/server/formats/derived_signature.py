"""A model's signature, derived from its example request and the result."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from batchmaker.errors import ModelError
from batchmaker.model.model import Model
from batchmaker.server.formats.audio import Audio, DeclaresAudio
from batchmaker.server.formats.signature import (
    DeclaresSignature,
    RequestForm,
    ResultForm,
    Signature,
    StreamForm,
    TensorSpec,
    as_array,
    datatype_of,
)

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_WIDER = {"FP64": "FP32"}
"""Python's floats are FP64, which networks rarely use."""


def signature_of(model: Model, result: Any, streamed: Sequence[Any]) -> Signature:
    """Return a model's tensors: as declared, or as its example request shows.

    result, streamed: the engine's result of the example request, as a whole and value by value. The first dimension of
    every input varies, and that of an output unless it is known to be fixed; the others are the example's. If requests
    are dicts, arguments of `unfold` with a default are optional inputs. Which input is sound, `serving_audio()` says.
    Raises ModelError if request or result is not a value or a flat list or dict of them.
    """
    signature = _signature_of(model, result, streamed)
    if not isinstance(model, DeclaresAudio):
        return signature
    audio: Any = model.serving_audio()
    if not isinstance(audio, Audio | None):
        raise ModelError(f"{type(model).__name__}.serving_audio() returned {type(audio).__name__}, not an Audio")
    return replace(signature, audio=audio)


def _signature_of(model: Model, result: Any, streamed: Sequence[Any]) -> Signature:
    if isinstance(model, DeclaresSignature):
        declared = model.serving_signature()
        _check_keys(model, declared)
        return declared
    request, inputs = _inputs(model)
    stream = _stream_form(result, streamed)
    form, outputs = _outputs(model, result, stream)
    defaults = _defaults(model) if request == "keys" else {}
    optional = {*model.optional_inputs, *defaults}
    specs = [replace(spec, optional=True) if spec.name in optional else spec for spec in inputs]
    names = {spec.name for spec in specs}
    specs += [replace(one, optional=True) for name, one in defaults.items() if one is not None and name not in names]
    return Signature(tuple(specs), outputs, request, form, stream, alone=model.sole_input)


def _check_keys(model: Model, declared: Signature) -> None:
    """Raise ModelError where unfold would get a dict of the inputs as the parameter that is named like one of them."""
    names = list(inspect.signature(model.unfold).parameters)
    if declared.request != "keys" or declared.encode is not None or declared.alone is not None or len(names) != 1:
        return
    if names[0] in (spec.name for spec in declared.inputs):
        raise ModelError(
            f"{type(model).__name__}.serving_signature() says request='keys', so unfold would get a dict as its only "
            f"parameter, {names[0]!r}, which is also the name of an input. Say request='value' for the input itself, "
            "or name the parameter otherwise"
        )


def _defaults(model: Model) -> dict[str, TensorSpec | None]:
    """Return the arguments of `unfold` with a default, with the tensor of the default; None for one that is none.

    They are empty where unfold takes the whole request as one argument.
    """
    parameters = inspect.signature(model.unfold).parameters.values()
    defaults: dict[str, TensorSpec | None] = {}
    for parameter in parameters if len(parameters) > 1 else ():
        if parameter.default is not parameter.empty and parameter.kind in _NAMED:
            try:
                defaults[parameter.name] = _spec(model, "a default", parameter.name, parameter.default)
            except (ModelError, KeyError):  # such as None: only the example can show what it may be
                defaults[parameter.name] = None
    return defaults


def _inputs(model: Model) -> tuple[RequestForm, tuple[TensorSpec, ...]]:
    example = model.example_request
    if example is None:
        raise ModelError(
            f"{type(model).__name__} has no example request, so nothing tells which tensors it takes. Set "
            "example_request, or define serving_signature()."
        )
    keyed = isinstance(example, Mapping)
    named = {str(key): value for key, value in example.items()} if keyed else {"input_0": example}
    specs = tuple(_spec(model, f"the example request's {name!r}", name, value) for name, value in named.items())
    return "keys" if keyed else "value", specs


def _outputs(model: Model, result: Any, stream: StreamForm) -> tuple[ResultForm, tuple[TensorSpec, ...]]:
    where = "the example's result"
    if isinstance(result, Mapping):
        return "keys", tuple(_spec(model, f"{where} {key!r}", str(key), value) for key, value in result.items())
    if isinstance(result, tuple) or (stream != "elements" and _holds_tensors(result)):
        names = getattr(result, "_fields", None) or [f"output_{index}" for index in range(len(result))]
        specs = (_spec(model, f"{where} {name!r}", name, value) for name, value in zip(names, result, strict=True))
        return "items", tuple(specs)
    fixed = stream == "result" and not isinstance(result, list)
    return "value", (_spec(model, where, "output_0", result, fixed=fixed),)


def _holds_tensors(result: Any) -> bool:
    return isinstance(result, list) and any(_shape(item) for item in result)


def _spec(model: Model, where: str, name: str, value: Any, *, fixed: bool = False) -> TensorSpec:
    try:
        array = as_array(value)
    except (ValueError, TypeError) as error:
        raise ModelError(
            f"{type(model).__name__}: {where} cannot be a tensor ({error}). Define serving_signature() and say which "
            "tensors it takes and gives."
        ) from None
    datatype = datatype_of(array)
    if isinstance(value, float | list):
        datatype = _WIDER.get(datatype, datatype)
    shape = array.shape or (1,)
    if array.ndim and not fixed:
        shape = (-1, *shape[1:])
    return TensorSpec(name, datatype, shape)


def _stream_form(result: Any, streamed: Sequence[Any]) -> StreamForm:
    """Return whether the streamed values are the elements of the result, or the result itself."""
    if isinstance(result, Mapping | tuple):
        return "result" if len(streamed) == 1 and isinstance(streamed[0], type(result)) else "values"
    parts = [_shape(value) for value in streamed]
    whole = _shape(result)
    if whole and len(parts) == whole[0] and all(part == whole[1:] for part in parts):
        return "elements"
    return "result" if parts == [whole] else "values"


def _shape(value: Any) -> tuple[int, ...] | None:
    try:
        return as_array(value).shape
    except (ValueError, TypeError):
        return None
