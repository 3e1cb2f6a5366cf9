"""Sound as clients send it: PCM of 16 bits and G.711 mu-law as the floats of a model's input."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, final, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from batchmaker.errors import ModelError, unknown_name
from batchmaker.server.faults import invalid

FULL_SCALE: Final = 32768.0
"""What a sample of 1.0 is in PCM of 16 bits."""

_BIAS: Final = 0x84
"""Of G.711 mu-law, in 16 bits."""


class Encoding(NamedTuple):
    """How samples are written. rate: samples a second where nothing is said; None for the model's."""

    name: str
    dtype: np.dtype[Any]
    rate: int | None = None

    @property
    def width(self) -> int:
        """Bytes of a sample."""
        return self.dtype.itemsize


PCM16: Final = Encoding("pcm16", np.dtype("<i2"))
PCMU: Final = Encoding("pcmu", np.dtype("u1"), 8000)
FLOAT32: Final = Encoding("float32", np.dtype("<f4"))
"""Of WAV files, from -1 to 1."""

ENCODINGS: Final[dict[str, Encoding]] = {"pcm16": PCM16, "pcmu": PCMU, "mulaw": PCMU}
"""By their names for clients."""


@final
@dataclass(frozen=True, slots=True)
class Audio:
    """That an input is sound of one channel: the result of a model's `serving_audio()`.

    Clients may then send it as PCM of 16 bits, little-endian, or as G.711 mu-law, and the model gets float32.

    - sample_rate: samples a second. Sound of another rate is refused, but by Transcriptions(resample=True).
    - scale: a sample in the model's input for one step of 16 bits. 1/32768 for samples from -1 to 1; 1 for those of
      Kaldi's kind, from -32768 to 32767.
    - input: the name of the input; None for the only one. It is of floats, and one dimension varies: samples [n], or
      rows of samples such as [n, 160].
    """

    sample_rate: int
    scale: float = 1 / FULL_SCALE
    input: str | None = None

    def __post_init__(self) -> None:
        if self.sample_rate < 1 or not math.isfinite(self.scale) or self.scale == 0.0:
            raise ModelError(
                f"Audio(sample_rate={self.sample_rate!r}, scale={self.scale!r}): the rate must be a whole number above "
                "0, and the scale a finite number other than 0"
            )

    def check_rate(self, rate: int, what: str) -> None:
        """Raise INVALID for sound of another rate than the model's. what: the sound."""
        if rate != self.sample_rate:
            raise invalid(
                f"{what} is sound of {rate} Hz, and the model takes {self.sample_rate} Hz: resample it before it is "
                "sent; the server does not"
            )

    def encoding(self, name: str, rate: int | None = None) -> Encoding:
        """Return the encoding of this name. rate: of the sound, if the client says so. INVALID if it does not fit."""
        encoding = named_encoding(name, ENCODINGS)
        if rate is None:
            rate = encoding.rate
        if rate is not None:
            self.check_rate(rate, name)
        return encoding

    def samples(self, data: bytes | memoryview, encoding: Encoding) -> NDArray[np.float32]:
        """Return encoded sound as float32 [n] in the model's scale. INVALID if it is no whole number of samples."""
        self.check_whole(data, encoding)
        values: NDArray[Any] = np.frombuffer(data, encoding.dtype)
        if encoding is PCMU:
            values = _MU_LAW[values]
        return _scaled(values, FULL_SCALE * self.scale if encoding is FLOAT32 else self.scale)

    @staticmethod
    def check_whole(data: bytes | memoryview, encoding: Encoding) -> None:
        """Raise INVALID for bytes that are no whole number of samples."""
        width = encoding.width
        if len(data) % width:
            raise invalid(
                f"{len(data)} bytes of sound are no whole number of samples: in {encoding.name} each has {width} bytes"
            )

    def of_steps(self, steps: NDArray[Any]) -> NDArray[np.float32]:
        """Return PCM of 16 bits, as integers of any shape, in the model's scale."""
        return _scaled(steps, self.scale)


def _scaled(values: NDArray[Any], scale: float) -> NDArray[np.float32]:
    scaled: NDArray[np.float32] = np.multiply(values, np.float32(scale), dtype=np.float32)
    return scaled


def named_encoding(name: str, known: Mapping[str, Encoding]) -> Encoding:
    """Return the encoding of this name. INVALID for none of the known ones."""
    if name not in known:
        raise invalid(str(unknown_name("encoding of sound", name[:32], known)))
    return known[name]


def in_rows(samples: NDArray[np.float32], shape: Sequence[int]) -> NDArray[np.float32]:
    """Return samples [n] in an input's shape, one of whose sizes is -1. INVALID if they are no whole number of rows."""
    row = row_of(shape)
    if len(samples) % row:
        raise invalid(f"{len(samples)} samples are no whole number of rows of {row}: the input has shape {list(shape)}")
    return samples.reshape([len(samples) // row if size == -1 else size for size in shape])


def row_of(shape: Sequence[int]) -> int:
    """Return the number of samples in each step of the dimension that varies."""
    return math.prod(size for size in shape if size != -1)


def _mu_law_table() -> NDArray[np.int16]:
    """Return the sample in 16 bits of each byte (ITU-T G.711): a sign, 3 bits of exponent, 4 of mantissa."""
    code = ~np.arange(256, dtype=np.uint8)
    exponent, mantissa = (code >> 4) & 7, code & 15
    size = ((mantissa.astype(np.int32) << 3) + _BIAS << exponent.astype(np.int32)) - _BIAS
    return np.where(code & 0x80, -size, size).astype(np.int16)


_MU_LAW: Final = _mu_law_table()


@runtime_checkable
class DeclaresAudio(Protocol):
    """A model one of whose inputs is sound; None if none is."""

    def serving_audio(self) -> Audio | None: ...
