"""RWKV, a recurrent network with linear attention in place of a Transformer's (Peng et al. 2023, RWKV-4)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from batchmaker.lab.zoo.language import LanguageModel, LanguageNetwork, StatePart, TheirWeights, config_and_weights
from batchmaker.lab.zoo.parts import check_positive, seeded

NOTHING_READ = -1e30
"""The largest exponent of the keys so far, before the first token."""


def _mixed(x: Tensor, before: Tensor, share: Tensor) -> Tensor:
    """Return a mean of x and the x of the token before (section 3.1, token shift)."""
    return x * share + before * (1 - share)


def _before(x: Tensor, first: Tensor) -> Tensor:
    """Return the x of the step before at each step: x [n, steps, hidden], and first [n, hidden] at the first."""
    return torch.cat([first[:, None], x[:, :-1]], 1)


@final
class TimeMixing(nn.Module):
    """The mean of all values so far, weighted by keys and by age: (x, before, numerator, denominator, exponent).

    Equations 11 to 15, and appendix D for the state: sums of exponentials are kept divided by e^exponent. The new
    numerator, denominator and exponent follow the result. All float32 but for x and before.
    """

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.time_decay, self.time_first = nn.Parameter(torch.empty(inner)), nn.Parameter(torch.empty(inner))
        self.time_mix_key, self.time_mix_value, self.time_mix_receptance = (
            nn.Parameter(torch.empty(hidden)) for _ in range(3)
        )
        self.key, self.value, self.receptance = (nn.Linear(hidden, inner, bias=False) for _ in range(3))
        self.output = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor, before: Tensor, *sums: Tensor) -> tuple[Tensor, ...]:
        key, value, gate = self.projected(x, before)
        mean, *after = self.step(key, value, *sums)
        return self.output(gate * mean.to(x.dtype)), *after

    def projected(self, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, values and gates: what depends on no sum."""
        key = self.key(_mixed(x, before, self.time_mix_key)).float()
        value = self.value(_mixed(x, before, self.time_mix_value)).float()
        return key, value, torch.sigmoid(self.receptance(_mixed(x, before, self.time_mix_receptance)))

    def step(
        self, key: Tensor, value: Tensor, numerator: Tensor, denominator: Tensor, exponent: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the mean with this key and value, and the new numerator, denominator and exponent."""
        now = key + self.time_first.float()
        largest = torch.maximum(exponent, now)
        past, present = torch.exp(exponent - largest), torch.exp(now - largest)
        mean = (past * numerator + present * value) / (past * denominator + present)
        aged = exponent - torch.exp(self.time_decay.float())
        exponent = torch.maximum(aged, key)
        past, present = torch.exp(aged - exponent), torch.exp(key - exponent)
        return mean, past * numerator + present * value, past * denominator + present, exponent


@final
class ChannelMixing(nn.Module):
    """(x, before) -> x: a feed-forward layer with squared ReLU behind a gate (equations 16 to 18)."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.time_mix_key, self.time_mix_receptance = (nn.Parameter(torch.empty(hidden)) for _ in range(2))
        self.key, self.value = nn.Linear(hidden, inner, bias=False), nn.Linear(inner, hidden, bias=False)
        self.receptance = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        key = torch.square(torch.relu(self.key(_mixed(x, before, self.time_mix_key))))
        gate = torch.sigmoid(self.receptance(_mixed(x, before, self.time_mix_receptance)))
        fed: Tensor = gate * self.value(key)
        return fed


@final
class RwkvBlock(nn.Module):
    """(x, last x of the attention, last x of the feed-forward layer, the attention's sums) -> the same.

    halves: divide x by 2 at the end, so that it stays within 16-bit floats. The weights of later outputs are divided
    accordingly.
    """

    def __init__(self, hidden: int, attention: int, inner: int, *, is_first: bool, halves: bool) -> None:
        super().__init__()
        self.pre_ln = nn.LayerNorm(hidden) if is_first else None
        self.ln1, self.ln2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention, self.feed_forward = TimeMixing(hidden, attention), ChannelMixing(hidden, inner)
        self.halves = halves

    def forward(self, x: Tensor, mixed: Tensor, fed: Tensor, *sums: Tensor) -> tuple[Tensor, ...]:
        """Return x after the block [n, hidden], and the state after the step."""
        if self.pre_ln is not None:
            x = self.pre_ln(x)
        attended = self.ln1(x)
        read, *sums = self.attention(attended, mixed, *sums)
        x = x + read
        ffn_input = self.ln2(x)
        x = x + self.feed_forward(ffn_input, fed)
        return x / 2 if self.halves else x, attended, ffn_input, *sums

    def whole(self, x: Tensor, last: Tensor, mixed: Tensor, fed: Tensor, *sums: Tensor) -> tuple[Tensor, ...]:
        """Return the same for all steps of sequences, x: [n, steps, hidden], and the state after the step `last`."""
        if self.pre_ln is not None:
            x = self.pre_ln(x)
        attended, steps = self.ln1(x), list[tuple[Tensor, ...]]()
        keys, values, gates = self.attention.projected(attended, _before(attended, mixed))
        for key, value in zip(keys.unbind(1), values.unbind(1), strict=True):
            mean, *sums = self.attention.step(key, value, *sums)  # type: ignore[assignment]
            steps.append((mean, *sums))
        means, *after = (torch.stack(part, 1) for part in zip(*steps, strict=True))
        x = x + self.attention.output(gates * means.to(x.dtype))
        ffn_input = self.ln2(x)
        x = x + self.feed_forward(ffn_input, _before(ffn_input, fed))
        rows = torch.arange(len(x))
        return x / 2 if self.halves else x, *(part[rows, last] for part in (attended, ffn_input, *after))


@final
class RwkvNetwork(LanguageNetwork):
    """Embeddings, blocks and a head. The names of the weights are those of transformers' RwkvForCausalLM."""

    def __init__(
        self,
        vocabulary_size: int,
        hidden: int,
        layers: int,
        attention: int,
        inner: int,
        rescale_every: int,
        dtype: str,
        epsilon: float = 1e-5,
    ) -> None:
        super().__init__()
        self.vocabulary_size = vocabulary_size
        self.embeddings = nn.Embedding(vocabulary_size, hidden)
        self.blocks = nn.ModuleList(
            RwkvBlock(
                hidden,
                attention,
                inner,
                is_first=number == 0,
                halves=rescale_every > 0 and (number + 1) % rescale_every == 0,
            )
            for number in range(layers)
        )
        for norm in self.blocks.modules():
            if isinstance(norm, nn.LayerNorm):
                norm.eps = epsilon
        self.ln_out = nn.LayerNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocabulary_size, bias=False)
        before, total = StatePart((hidden,), dtype), StatePart((attention,), "float32")
        self.parts = (before, before, total, total, StatePart((attention,), "float32", NOTHING_READ)) * layers
        for number in range(layers):
            self._draw(number)

    @torch.no_grad()
    def _draw(self, number: int) -> None:
        """Set decays, first weights and shares of token shift as appendix E has them before training."""
        block: Any = self.blocks[number]
        depth, height = number / max(len(self.blocks) - 1, 1), number / len(self.blocks)
        mixing, feeding = block.attention, block.feed_forward
        width, inner = len(mixing.time_mix_key), len(mixing.time_decay)
        place, channel = torch.arange(width) / width, torch.arange(inner)
        mixing.time_decay.copy_(-5 + 8 * (channel / max(inner - 1, 1)) ** (0.7 + 1.3 * depth))
        mixing.time_first.copy_(math.log(0.3) + 0.5 * ((channel + 1) % 3 - 1))
        share = place ** (1 - height)
        mixing.time_mix_key.copy_(share)
        mixing.time_mix_value.copy_(share + 0.3 * depth)
        mixing.time_mix_receptance.copy_(place ** (0.5 * (1 - height)))
        feeding.time_mix_key.copy_(share)
        feeding.time_mix_receptance.copy_(share)

    def head(self, x: Tensor) -> Tensor:
        scores: Tensor = self.lm_head(self.ln_out(x))
        return scores


@final
class RwkvModel(LanguageModel):
    """RWKV-4: goes on with a prompt. Requests and results as in LanguageModel.

    vocabulary_size, hidden, layers: sizes, by default those of RWKV-4 169M. attention, inner: widths inside the blocks,
    by default hidden and 4 * hidden. rescale_every: halve x after so many blocks, as 16-bit floats need; 0 never.
    """

    def __init__(
        self,
        vocabulary_size: int = 50_277,
        hidden: int = 768,
        layers: int = 12,
        attention: int | None = None,
        inner: int | None = None,
        rescale_every: int = 6,
        epsilon: float = 1e-5,
        eos: int | None = 0,
        dtype: str = "float32",
        max_batch: int = 256,
        seed: int = 0,
    ) -> None:
        attention, inner = hidden if attention is None else attention, 4 * hidden if inner is None else inner
        check_positive(vocabulary_size=vocabulary_size, hidden=hidden, layers=layers, attention=attention, inner=inner)
        with seeded(seed):
            network = RwkvNetwork(vocabulary_size, hidden, layers, attention, inner, rescale_every, dtype, epsilon)
        super().__init__(network, eos, dtype, max_batch)

    @classmethod
    def of(cls, model: Any, tokenizer: Any = None, *, dtype: str = "float32", max_batch: int = 256) -> Self:
        """Return the model with the sizes and weights of transformers' RwkvForCausalLM, and perhaps its tokenizer.

        ModelError if it is no such model.
        """
        config, weights = config_and_weights(model, "rwkv", "head")
        if model.rwkv.layers_are_rescaled:  # it has divided its weights, when it first ran
            for name, share in _shares(weights, config["rescale_every"]):
                weights[name] = weights[name] * share
        made = cls.of_weights(config, weights, dtype=dtype, max_batch=max_batch)
        made.tokenizer = tokenizer
        return made

    @classmethod
    def of_weights(
        cls, config: Mapping[str, Any], weights: Mapping[str, Tensor], *, dtype: str = "float32", max_batch: int = 256
    ) -> Self:
        """Return the model of a folder of transformers: its config.json, and its weights by name.

        ModelError if they are of another network.
        """
        theirs, every = TheirWeights(config, weights, "rwkv", "head"), int(config.get("rescale_every", 6))
        (attention, _), (inner, _) = (
            theirs.shape(f"blocks.0.{part}.key.weight") for part in ("attention", "feed_forward")
        )
        made = cls(
            **theirs.sizes(), attention=attention, inner=inner, rescale_every=every, dtype=dtype, max_batch=max_batch
        )
        for name, weight in theirs.by_name.items():
            if "time_mix" in name:
                theirs.by_name[name] = weight.flatten()
        for name, share in _shares(theirs.by_name, every):
            theirs.by_name[name] = theirs.by_name[name] / share
        theirs.copy_into(made._network)
        return made


def _shares(weights: Mapping[str, Tensor], every: int) -> list[tuple[str, int]]:
    """Return the weights that are divided where x is halved after so many blocks, each with its divisor."""
    ends = ("attention.output.weight", "feed_forward.value.weight")
    names = [name for name in weights if name.endswith(ends)] if every > 0 else []
    return [(name, 2 ** (int(name[name.index("blocks.") :].split(".")[1]) // every)) for name in names]
