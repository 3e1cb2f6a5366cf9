"""A model's request and result as named tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from batchmaker.errors import ModelError, nearest_name
from batchmaker.server.faults import invalid
from batchmaker.server.formats.audio import Audio
from batchmaker.server.formats.messages import WantedOutput
from batchmaker.server.formats.tensors import MAX_NAME, NUMPY, Tensor, kind_of
from batchmaker.server.limits import Limits

RequestForm = Literal["value", "keys"]
ResultForm = Literal["value", "items", "keys"]
StreamForm = Literal["elements", "result", "values"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, datatype and shape of an input or output; -1 for a dimension that varies.

    A shape of (1,) is a single number or string for the model too. optional: an input that a client may leave out.
    ModelError for a name that clients could not write.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= MAX_NAME or not self.name.isprintable() or '"' in self.name or "\\" in self.name:
            raise ModelError(
                f"{self.name[:64]!r} cannot be the name of an input or output: give it 1 to {MAX_NAME} characters that "
                "can be printed, without quotation marks and backslashes"
            )

    @property
    def single(self) -> bool:
        return self.shape == (1,)


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs and outputs of a model.

    - request: the model's request is the only input itself ("value"), or a dict of the inputs given ("keys").
    - alone: an input that is the request itself if no other is given.
    - result: the only output ("value"), or the outputs in order ("items") or by name ("keys").
    - stream: streamed values are elements of the only output along its first dimension, or the result as a whole, or
      values that are in no output.
    - encode: converts the client's input into the argument of `unfold`, such as the ids of a text.
    - decode: converts a result, given the client's input, into the value to send, such as the words of ids. With it
      nothing streams before the end.
    - audio: which input is sound, so that it may also come as PCM of 16 bits or mu-law, and as a tensor of INT16. From
      the model's `serving_audio()`, if it has one. ModelError if that input cannot be sound.

    encode and decode are called in the server's own thread, so they must be fast.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    request: RequestForm = "keys"
    result: ResultForm = "value"
    stream: StreamForm = "result"
    alone: str | None = None
    encode: Callable[[Any], Any] | None = None
    decode: Callable[[Any, Any], Any] | None = None
    audio: Audio | None = None

    def __post_init__(self) -> None:
        if self.audio is not None and self.audio_input is None:
            named = "the only required input" if self.audio.input is None else f"input {self.audio.input!r}"
            specs = ", ".join(f"{spec.name!r}: {spec.datatype} {list(spec.shape)}" for spec in self.inputs)
            raise ModelError(
                f"sound must be a tensor of floats with one dimension that varies, and {named} is none; the inputs are "
                f"{specs}"
            )

    @property
    def audio_input(self) -> TensorSpec | None:
        """The input that is sound; None if none is."""
        if self.audio is None:
            return None
        name = self.audio.input
        specs = [spec for spec in self.inputs if spec.name == name or (name is None and not spec.optional)]
        if len(specs) != 1 or kind_of(specs[0].datatype) != "f" or 0 in specs[0].shape:
            return None
        return specs[0] if specs[0].shape.count(-1) == 1 else None

    @property
    def single_outputs(self) -> frozenset[str]:
        """Names of outputs that are one value each."""
        return frozenset(spec.name for spec in self.outputs if spec.single)

    @property
    def single_parts(self) -> frozenset[str]:
        """Names of the outputs that are one value in each part of a stream."""
        if self.stream == "elements":
            return frozenset(spec.name for spec in self.outputs if len(spec.shape) == 1)
        return self.single_outputs

    def to_request(self, tensors: Sequence[Tensor], limits: Limits) -> Any:
        """Return the client's input, before any `encode`. INVALID unless the tensors fit."""
        values: dict[str, Any] = {}
        check_once([tensor.name for tensor in tensors])
        for tensor in tensors:
            spec = self.check_input(tensor.name, tensor.datatype, tensor.shape, limits)
            if self._is_pcm(spec, tensor.datatype) and self.audio is not None:
                tensor = Tensor(tensor.name, "FP32", self.audio.of_steps(tensor.data))
            values[tensor.name] = _input_value(spec, tensor)
        missing = [spec.name for spec in self.inputs if not spec.optional and spec.name not in values]
        if missing:
            raise invalid(f"input {missing[0]!r} is missing; the inputs are {_listed(self.inputs)}")
        if self.request == "value":
            return values[self.inputs[0].name]
        return values[self.alone] if self.alone is not None and set(values) == {self.alone} else values

    def input_maker(self, spec: TensorSpec) -> Callable[[Any], Any]:
        """Return what makes the client's input of the value of this input, if no other is given; see to_request."""
        if self.request == "value" or self.alone == spec.name:
            return lambda value: value
        name = spec.name
        return lambda value: {name: value}

    @property
    def plain_output(self) -> np.dtype[Any] | None:
        """The dtype of the only output, if the result itself is its values; None if they have to be converted."""
        plain = self.result == "value" and self.outputs[0].datatype not in ("BF16", "BYTES")
        return NUMPY[self.outputs[0].datatype] if plain else None

    def check_input(self, name: str, datatype: str, shape: Sequence[int], limits: Limits) -> TensorSpec:
        """Return the input of this name. INVALID if there is none, or it takes no tensor of this datatype and shape."""
        for spec in self.inputs:
            if spec.name == name:
                break
        else:
            near = nearest_name(name[:64], [spec.name for spec in self.inputs])
            raise invalid(f"unknown input {name[:64]!r}; the inputs are {_listed(self.inputs)}.{near}")
        alike = datatype == spec.datatype or kind_of(datatype) == kind_of(spec.datatype)
        if not alike and not self._is_pcm(spec, datatype):
            raise invalid(f"input {name!r}: got {datatype}, expected {spec.datatype}")
        sizes = (1,) if not shape and spec.single else shape
        fits = len(sizes) == len(spec.shape)
        for got, want in zip(sizes, spec.shape, strict=False):
            fits = fits and want in (-1, got)
        if not fits:
            raise invalid(f"input {name!r}: got shape {list(shape)}, expected {list(spec.shape)} (-1: any size)")
        if max(sizes, default=0) > limits.max_sequence:
            raise invalid(f"input {name!r}: a dimension of {max(sizes)} is more than {limits.max_sequence}")
        return spec

    def _is_pcm(self, spec: TensorSpec, datatype: str) -> bool:
        return datatype == "INT16" and self.audio is not None and spec is self.audio_input

    def check_outputs(self, wanted: Sequence[WantedOutput]) -> None:
        """Raise INVALID for an output that the model does not have, or one that is named twice.

        So an answer has each output once at most: nobody gets more of it by asking again in one request.
        """
        unnamed = {spec.name: True for spec in self.outputs}
        for output in wanted:
            if output.name not in unnamed:
                raise invalid(f"unknown output {output.name[:64]!r}; the outputs are {_listed(self.outputs)}")
            if not unnamed[output.name]:
                raise invalid(f"output {output.name!r} is named twice; name each once")
            unnamed[output.name] = False

    def to_outputs(self, result: Any, wanted: Sequence[WantedOutput] = ()) -> tuple[Tensor, ...]:
        """Return a result as tensors: all, or the wanted ones in their order."""
        if self.result == "value":
            values: list[Any] = [result]
        elif self.result == "items":
            values = list(result)
        else:
            values = [result[spec.name] for spec in self.outputs]
        tensors = {spec.name: output_tensor(spec, value) for spec, value in zip(self.outputs, values, strict=True)}
        return tuple(tensors[output.name] for output in wanted) if wanted else tuple(tensors.values())

    def to_part(self, value: Any) -> tuple[Tensor, ...]:
        """Return one streamed value as tensors. The concatenated parts of a streamed sequence are the whole output."""
        if self.stream == "result":
            return self.to_outputs(value)
        if self.stream == "elements":
            spec = self.outputs[0]
            return (Tensor(spec.name, spec.datatype, as_array(value).astype(NUMPY[spec.datatype])[None]),)
        items = value if isinstance(value, list | tuple) else [value]
        arrays = [as_array(item) for item in items]
        return tuple(
            Tensor(f"output_{index}", datatype_of(array), array if array.ndim else array[None])
            for index, array in enumerate(arrays)
        )


def check_once(names: Sequence[str]) -> None:
    """Raise INVALID for an input that is given twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise invalid(f"input {name[:64]!r} is given twice")
        seen.add(name)


@runtime_checkable
class DeclaresSignature(Protocol):
    """A model that declares its tensors itself, if its example request is not enough."""

    def serving_signature(self) -> Signature: ...


def _listed(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(repr(spec.name) + (" (optional)" if spec.optional else "") for spec in specs)


def _input_value(spec: TensorSpec, tensor: Tensor) -> Any:
    """Return one input in the model's form: an array, or a list of strings, or a single one of either."""
    if spec.datatype == "BYTES":
        strings = _strings(spec.name, tensor.data)
        return strings[0] if spec.single else strings
    data = _converted(spec, tensor)
    return data.reshape(()).item() if spec.single else data


def _strings(name: str, data: NDArray[Any]) -> list[str]:
    try:
        return [item.decode() for item in data.reshape(-1)]
    except UnicodeDecodeError:
        raise invalid(f"input {name!r}: a string is not UTF-8") from None


def _converted(spec: TensorSpec, tensor: Tensor) -> NDArray[Any]:
    """Return the data in the spec's datatype. INVALID for a number that does not fit: none becomes infinite."""
    dtype = NUMPY[spec.datatype]
    if tensor.data.dtype == dtype:
        return tensor.data
    if dtype.kind in "iu" and tensor.data.size:
        low, high = int(tensor.data.min()), int(tensor.data.max())
        bounds = np.iinfo(dtype)
        if low < bounds.min or high > bounds.max:
            raise invalid(f"input {spec.name!r}: {low if low < bounds.min else high} does not fit in {spec.datatype}")
    try:
        with np.errstate(over="raise"):
            return tensor.data.astype(dtype)
    except FloatingPointError:
        raise invalid(f"input {spec.name!r}: a value of {tensor.datatype} does not fit in {spec.datatype}") from None


# --- results --------------------------------------------------------------------------------------------------------


def as_array(value: Any) -> NDArray[Any]:
    """Return a tensor, number, string, or a list of them as an array. ValueError for anything else."""
    if isinstance(value, torch.Tensor):
        if value.is_cpu and not value.requires_grad and value.dtype != torch.bfloat16:
            return value.numpy()
        value = value.detach().cpu()
        return np.asarray(value.float() if value.dtype == torch.bfloat16 else value)
    if isinstance(value, list | tuple) and value and isinstance(value[0], torch.Tensor):
        return np.stack([as_array(item) for item in value])
    if isinstance(value, str | bytes):
        return _bytes_array([value])[0:1].reshape(())
    array = np.asarray(value)
    if array.dtype.kind in "US":
        return _bytes_array(array.reshape(-1).tolist()).reshape(array.shape)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{type(value).__name__} is no tensor")
    return array


def _bytes_array(items: Sequence[str | bytes]) -> NDArray[Any]:
    array = np.empty(len(items), object)
    array[:] = [item.encode() if isinstance(item, str) else item for item in items]
    return array


_DATATYPE_OF = {dtype.newbyteorder("="): name for name, dtype in NUMPY.items() if name != "BF16"}


def datatype_of(array: NDArray[Any]) -> str:
    """Return the datatype in which an array is sent. bfloat16 arrives here as float32 and is sent as FP32."""
    return _DATATYPE_OF[array.dtype.newbyteorder("=")]


def output_tensor(spec: TensorSpec, value: Any) -> Tensor:
    """Return one output as a tensor of its declared datatype; a single value has the shape [1]."""
    array = as_array(value)
    if array.ndim == 0:
        array = array[None]
    return Tensor(spec.name, spec.datatype, array.astype(NUMPY[spec.datatype], copy=False))
