"""Choosing tokens from scores, with random numbers that depend on a request's seed and step alone.

For use in the `forward` of a cell, after the scores (logits). `seed` and `step` are two of its inputs, one int64 per
row, and the cell returns `step + 1` for the next step:

    word = self.sample(self.out(h), seed, step)
    return word, h, seed, step + 1

The numbers are a function of (seed, step), so they are the same alone and in any batch, under any policy, on any worker
and device, and again in another run (decision 36). They are not for cryptography.

All modules work row by row on scores [n, tokens], of any floating dtype, and compute in float32. Options are constants
of the module, or given to `forward` as one number per row [n], which then counts. Of tokens with equal scores the one
with the lower number is the more likely one wherever an order decides.
"""

from __future__ import annotations

import math
from typing import Final, final

import torch
from torch import Tensor, nn

from batchmaker.errors import OptionError


def _signed(number: int) -> int:
    """Return the int64 with the last 64 bits of a number."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


_GAMMA: Final = _signed(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio. Here and below sums and products of int64 wrap around."""
_ROUNDS: Final = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))
_UNIT: Final = 1 << 40
"""The weight of the most likely token. Weights are integers, so their sums do not depend on the order of adding."""


def bits(seed: Tensor, step: Tensor, *, stream: int = 0) -> Tensor:
    """Return 64 random bits for each row, int64 [n]: those of SplitMix64, as a function of a counter.

    seed, step: integers [n], any. stream: another one makes other numbers of the same seeds and steps, for a second use
    in one cell.
    """
    for name, value in (("seed", seed), ("step", step)):
        if value.dtype.is_floating_point or value.dtype is torch.bool:
            raise TypeError(f"{name} must be integers, one per row; got {value.dtype}")
    begin = _mixed(seed.long() + _signed(stream * _GAMMA))
    return _mixed(begin + (step.long() + 1) * _GAMMA)


def uniform(seed: Tensor, step: Tensor, *, stream: int = 0) -> Tensor:
    """Return a random number of [0, 1) for each row, float64 [n], a multiple of 2^-53. Arguments as for `bits`."""
    return _shifted(bits(seed, step, stream=stream), 11).double() * 2.0**-53


def _mixed(state: Tensor) -> Tensor:
    """Return the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    for shift, factor in _ROUNDS:
        state = (state ^ _shifted(state, shift)) * factor
    return state ^ _shifted(state, 31)


def _shifted(state: Tensor, by: int) -> Tensor:
    """Return the bits moved to the right, with zeros from the left."""
    return (state >> by) & ((1 << (64 - by)) - 1)


@final
class Greedy(nn.Module):
    """The token with the highest score: scores [n, tokens] -> int64 [n]. The first one of several, or of NaNs."""

    def forward(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1)


@final
class Temperature(nn.Module):
    """Scores divided by the temperature, float32 [n, tokens], so that the highest is 0.

    temperature: 1 leaves the probabilities as they are; smaller ones prefer the likely tokens. 0 (in a row also one
    below 0, or NaN) leaves the token that `Greedy` chooses, and gives the others -inf. OptionError below 0.
    """

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        if not _is_number(temperature) or not 0 <= temperature < math.inf:
            raise OptionError(f"temperature must be a number of at least 0, got {temperature!r}")
        self.temperature = float(temperature)

    def forward(self, logits: Tensor, temperature: Tensor | None = None) -> Tensor:
        """Return the scores divided, float32 [n, tokens]. temperature: [n], in place of the module's own."""
        scores = logits.float()
        scores = scores - scores.amax(-1, keepdim=True)
        if temperature is None and self.temperature == 1:
            return scores
        best = torch.arange(logits.shape[-1], device=logits.device) == logits.argmax(-1, keepdim=True)
        if temperature is None:
            return scores / self.temperature if self.temperature else torch.where(best, 0.0, -math.inf)
        each = temperature.float().unsqueeze(-1)
        divided = scores / torch.where(each > 0, each, 1.0)
        return torch.where(each > 0, divided, torch.where(best, 0.0, -math.inf))


@final
class TopK(nn.Module):
    """Scores of the k likeliest tokens, float32 [n, tokens]; the others become -inf.

    top_k: exactly so many are kept; all of them if it is 0, -1 or at least the number of tokens (in a row, also any
    other number below 1). OptionError below -1.
    """

    def __init__(self, top_k: int = 0) -> None:
        super().__init__()
        self.top_k = _checked_top_k(top_k)

    def forward(self, logits: Tensor, top_k: Tensor | None = None) -> Tensor:
        return _without_others(logits.float(), self.top_k if top_k is None else top_k, 1.0)


@final
class TopP(nn.Module):
    """Scores of the likeliest tokens whose probabilities sum to p, float32 [n, tokens]; the others become -inf.

    top_p: the smallest such set is kept: the likeliest token, and each following one while the sum of those before it
    is below p. 1 keeps all (in a row, 0 and less keep the likeliest token). OptionError unless 0 < top_p <= 1.
    """

    def __init__(self, top_p: float = 1.0) -> None:
        super().__init__()
        self.top_p = _checked_top_p(top_p)

    def forward(self, logits: Tensor, top_p: Tensor | None = None) -> Tensor:
        return _without_others(logits.float(), 0, self.top_p if top_p is None else top_p)


@final
class Sampler(nn.Module):
    """A token drawn by its probability: scores [n, tokens], seed [n], step [n] -> int64 [n].

    temperature, top_k, top_p: as in the modules of these names, applied in this order. stream: see `bits`. Tokens less
    likely than the likeliest by a factor of 2^40 are not drawn, nor are those with a score of -inf. In a row whose
    probabilities are not defined (a NaN, an infinite score, all -inf) the token is that of `Greedy`.
    """

    def __init__(self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, *, stream: int = 0) -> None:
        super().__init__()
        self.temperature = Temperature(temperature)
        self.top_k, self.top_p = _checked_top_k(top_k), _checked_top_p(top_p)
        self.stream = stream

    def forward(
        self,
        logits: Tensor,
        seed: Tensor,
        step: Tensor,
        temperature: Tensor | None = None,
        top_k: Tensor | None = None,
        top_p: Tensor | None = None,
    ) -> Tensor:
        """Return the token of each row, int64 [n]. temperature, top_k, top_p: [n], in place of the module's own."""
        point = uniform(seed, step, stream=self.stream)
        k, p = self.top_k if top_k is None else top_k, self.top_p if top_p is None else top_p
        scores = self.temperature(logits, temperature)
        if _keeps_all(k, p):
            weights = _weights(scores)
        else:  # back in the order of tokens: by likelihood, two that change places for a rounded score change the draw
            order, ranked, _ = _ranked(scores, k, p)
            weights = torch.zeros_like(ranked).scatter(-1, order, ranked)
        token, total = _token_at(point, weights)
        return torch.where(total > 0, token.squeeze(-1), logits.argmax(-1))


def _token_at(point: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the token that a point of [0, 1) falls on, [n, 1], and the sum of the weights [n, tokens], [n]."""
    sums = weights.cumsum(-1)
    total = sums[:, -1]
    at = torch.minimum((point * total).long(), total - 1)  # a large total is rounded, perhaps up
    place = (sums <= at.unsqueeze(-1)).sum(-1, keepdim=True)
    return place.clamp(max=weights.shape[-1] - 1), total


def _weights(scores: Tensor) -> Tensor:
    """Return integers in the ratio of the probabilities, int64 [n, tokens]; zeros where those are not defined."""
    likely = (scores - scores.amax(-1, keepdim=True)).exp()
    return (likely.nan_to_num(0.0) * _UNIT).long()


def _ranked(scores: Tensor, top_k: int | Tensor, top_p: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens from the likeliest on, their weights, 0 for those that are cut, and which are kept."""
    values, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    weights, kept = _weights(values), rank < scores.shape[-1]
    if isinstance(top_k, Tensor):
        k = top_k.unsqueeze(-1)
        kept = (rank < k) | (k < 1)
    elif top_k > 0:
        kept = rank < top_k
    weights = weights * kept
    if isinstance(top_p, Tensor) or top_p < 1:
        p = top_p.double().unsqueeze(-1) if isinstance(top_p, Tensor) else top_p
        sums = weights.cumsum(-1)
        within = (sums - weights < sums[:, -1:] * p) | (rank == 0)
        kept = kept & (within | (p >= 1) if isinstance(top_p, Tensor) else within)
        weights = weights * kept
    return order, weights, kept.expand_as(order)


def _without_others(scores: Tensor, top_k: int | Tensor, top_p: float | Tensor) -> Tensor:
    """Return the scores with -inf for the tokens that are cut."""
    if _keeps_all(top_k, top_p):
        return scores
    order, _, kept = _ranked(scores, top_k, top_p)
    return torch.where(torch.zeros_like(kept).scatter(-1, order, kept), scores, -math.inf)


def _keeps_all(top_k: int | Tensor, top_p: float | Tensor) -> bool:
    return not isinstance(top_k, Tensor) and top_k < 1 and not isinstance(top_p, Tensor) and top_p >= 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _checked_top_k(top_k: int) -> int:
    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < -1:
        raise OptionError(f"top_k must be a whole number of at least 1, or 0 or -1 for all tokens; got {top_k!r}")
    return top_k


def _checked_top_p(top_p: float) -> float:
    if not _is_number(top_p) or not 0 < top_p <= 1:
        raise OptionError(f"top_p must be above 0 and at most 1, got {top_p!r}")
    return float(top_p)
