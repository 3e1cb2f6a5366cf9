"""Sound of one rate as sound of another, piece by piece."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final, NamedTuple, final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from batchmaker.server.faults import invalid

STOPBAND_DB: Final = 80.0
PASSBAND: Final = 0.9
"""Up to this part of half of the lower rate frequencies pass; from half of it on they are below -STOPBAND_DB."""

_MOST_WEIGHTS: Final = 1 << 20
"""Of a filter. Rates with a small common divisor would need more."""


class _Filter(NamedTuple):
    """A low-pass filter, for frames of `up` samples that are made of `down`.

    weights: [window, up]: a frame is a window of the sound, times these. ahead: samples of the first window before the
    sound begins.
    """

    weights: NDArray[np.float32]
    up: int
    down: int
    ahead: int


@lru_cache(maxsize=16)
def _filter(rate: int, wanted: int) -> _Filter:
    """Return the filter between two rates. INVALID if it is too large.

    A sinc in a Kaiser window, of linear phase (Oppenheim and Schafer, Discrete-Time Signal Processing, 7.5.3), whose
    delay is taken back; by phases (Crochiere and Rabiner, Multirate Digital Signal Processing, 3.3).
    """
    divisor = math.gcd(rate, wanted)
    up, down = wanted // divisor, rate // divisor
    half = min(up, down) / (2 * up * down)  # half of the lower rate, in cycles a sample of the rate that both divide
    width = (1 - PASSBAND) * half
    delay = math.ceil((STOPBAND_DB - 7.95) / (2.285 * 2 * math.pi * width) / 2)
    taps = -(-(2 * delay + 1) // up)
    first, last = delay // up - (taps - 1), ((up - 1) * down + delay) // up
    window = last - first + 1
    if window * up > _MOST_WEIGHTS:
        raise invalid(f"sound of {rate} Hz cannot be made one of {wanted} Hz here: send {wanted} Hz")
    at = np.arange(-delay, delay + 1)
    cutoff = half - width / 2
    response = np.zeros(taps * up)
    beta = 0.1102 * (STOPBAND_DB - 8.7)
    response[: len(at)] = up * 2 * cutoff * np.sinc(2 * cutoff * at) * np.kaiser(len(at), beta)
    weights = np.zeros((window, up), np.float32)
    for number in range(up):
        base, phase = divmod(number * down + delay, up)
        weights[base - first - np.arange(taps), number] = response[phase::up]
    return _Filter(weights, up, down, -first)


@final
class Resampler:
    """Makes sound of `rate` sound of `wanted`, float32. What it makes does not depend on the pieces."""

    def __init__(self, rate: int, wanted: int) -> None:
        """Raises INVALID for rates that have no filter of a sensible size."""
        self.rate = rate
        self._filter = _filter(rate, wanted)
        self._kept = np.zeros(self._filter.ahead, np.float32)
        self._num_in = self._num_out = 0

    def feed(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return what is certain with these samples too."""
        self._num_in += len(samples)
        return self._made(samples)

    def rest(self) -> NDArray[np.float32]:
        """No sound comes any more: return what is left. Together as long as the sound, rounded up to a sample."""
        window, down, up = len(self._filter.weights), self._filter.down, self._filter.up
        missing = -(-self._num_in * up // down) - self._num_out
        return self._made(np.zeros(window + down, np.float32))[:missing]

    def _made(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        weights, _, down, _ = self._filter
        kept = np.concatenate([self._kept, samples])
        frames = max(0, (len(kept) - len(weights)) // down + 1)
        self._kept = kept[frames * down :]
        if not frames:
            return np.zeros(0, np.float32)
        made: NDArray[np.float32] = (sliding_window_view(kept, len(weights))[: frames * down : down] @ weights).reshape(
            -1
        )
        self._num_out += len(made)
        return made
