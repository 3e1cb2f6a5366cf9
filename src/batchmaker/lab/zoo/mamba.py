"""Mamba, a recurrent network whose linear state is read and written selectively (Gu and Dao 2023)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from batchmaker.errors import ModelError
from batchmaker.lab.zoo.language import LanguageModel, LanguageNetwork, StatePart, TheirWeights, config_and_weights
from batchmaker.lab.zoo.parts import check_positive, seeded


@final
class RmsNorm(nn.Module):
    """x over the root of its mean square, in float32, times a weight: [..., width]."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(width)), epsilon

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self.epsilon)).to(x.dtype)


@final
class MambaBlock(nn.Module):
    """(x, the last inputs of the convolution, the oldest first, h) -> the same (section 3.4).

    The convolution's inputs are a row each, so that a step moves none. h: [n, inner, state], float32.
    """

    def __init__(
        self, hidden: int, inner: int, state: int, rank: int, kernel: int, epsilon: float, bias: bool, conv_bias: bool
    ) -> None:
        super().__init__()
        self.norm = RmsNorm(hidden, epsilon)
        self.in_proj = nn.Linear(hidden, 2 * inner, bias=bias)
        self.conv1d = nn.Conv1d(inner, inner, kernel, groups=inner, bias=conv_bias)
        self.x_proj, self.dt_proj = nn.Linear(inner, rank + 2 * state, bias=False), nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, hidden, bias=bias)
        self.split = (rank, state, state)
        with torch.no_grad():  # so that the size of a step is between 0.001 and 0.1 (section 3.6)
            size = torch.exp(torch.rand(inner) * math.log(100) + math.log(0.001)).clamp(min=1e-4)
            self.dt_proj.bias.copy_(size + torch.log(-torch.expm1(-size)))

    def forward(self, x: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        *window, h = state
        inner, gate = self.in_proj(self.norm(x)).chunk(2, -1)
        window.append(inner)
        u, decay, added, read = self._projected(window)
        h = decay * h + added
        return self._out(x, u, (h * read).sum(-1), gate), *window[1:], h

    def whole(self, x: Tensor, last: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Return the same for all steps of sequences, x: [n, steps, hidden], and the state after the step `last`."""
        *window, h = state
        inner, gate = self.in_proj(self.norm(x)).chunk(2, -1)
        seen, steps = torch.cat([*(row[:, None] for row in window), inner], 1), x.shape[1]
        u, decay, added, read = self._projected([seen[:, at : at + steps] for at in range(len(window) + 1)])
        states = list[Tensor]()
        for step in range(steps):
            h = decay[:, step] * h + added[:, step]
            states.append(h)
        after, rows = torch.stack(states, 1), torch.arange(len(x))
        window = [seen[rows, last + at] for at in range(1, len(window) + 1)]
        return self._out(x, u, (after * read).sum(-1), gate), *window, after[rows, last]

    def _projected(self, window: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what depends on no h: the convolution, what h keeps, what is added, and how it is read.

        window: [..., inner] each, the oldest first. The last three are [..., inner or 1, state].
        """
        taps = self.conv1d.weight[:, 0]
        u = window[0] * taps[:, 0]
        for place, row in enumerate(window[1:], 1):
            u = u + row * taps[:, place]
        u = F.silu(u if self.conv1d.bias is None else u + self.conv1d.bias)
        size, write, read = self.x_proj(u).split(self.split, -1)
        size = F.softplus(self.dt_proj(size)).float()
        decay = torch.exp(size[..., None] * -torch.exp(self.A_log.float()))
        return u, decay, (size * u.float())[..., None] * write.float()[..., None, :], read.float()[..., None, :]

    def _out(self, x: Tensor, u: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        out: Tensor = x + self.out_proj(((y + u * self.D) * F.silu(gate)).to(x.dtype))
        return out


@final
class MambaNetwork(LanguageNetwork):
    """Embeddings, blocks and a head. The names of the weights are those of transformers' MambaForCausalLM."""

    def __init__(
        self,
        vocabulary_size: int,
        hidden: int,
        layers: int,
        inner: int,
        state: int,
        rank: int,
        kernel: int,
        epsilon: float,
        bias: bool,
        conv_bias: bool,
        dtype: str,
    ) -> None:
        super().__init__()
        self.vocabulary_size = vocabulary_size
        self.embeddings = nn.Embedding(vocabulary_size, hidden)
        self.blocks = nn.ModuleList(
            MambaBlock(hidden, inner, state, rank, kernel, epsilon, bias, conv_bias) for _ in range(layers)
        )
        self.norm_f = RmsNorm(hidden, epsilon)
        self.lm_head = nn.Linear(hidden, vocabulary_size, bias=False)
        self.parts = (*(StatePart((inner,), dtype),) * (kernel - 1), StatePart((inner, state), "float32")) * layers

    def head(self, x: Tensor) -> Tensor:
        scores: Tensor = self.lm_head(self.norm_f(x))
        return scores


@final
class MambaModel(LanguageModel):
    """Mamba: goes on with a prompt. Requests and results as in LanguageModel.

    vocabulary_size, hidden, layers: sizes, by default those of mamba-130m. inner: the width inside a block, by default
    2 * hidden. state: numbers kept of each of its channels. rank: width of the projection that gives the size of a
    step, by default a 16th of hidden. kernel: tokens that a convolution sees.
    """

    def __init__(
        self,
        vocabulary_size: int = 50_280,
        hidden: int = 768,
        layers: int = 24,
        inner: int | None = None,
        state: int = 16,
        rank: int | None = None,
        kernel: int = 4,
        epsilon: float = 1e-5,
        bias: bool = False,
        conv_bias: bool = True,
        eos: int | None = 0,
        dtype: str = "float32",
        max_batch: int = 256,
        seed: int = 0,
    ) -> None:
        inner, rank = 2 * hidden if inner is None else inner, math.ceil(hidden / 16) if rank is None else rank
        check_positive(
            vocabulary_size=vocabulary_size,
            hidden=hidden,
            layers=layers,
            inner=inner,
            state=state,
            rank=rank,
            kernel=kernel,
        )
        with seeded(seed):
            network = MambaNetwork(
                vocabulary_size, hidden, layers, inner, state, rank, kernel, epsilon, bias, conv_bias, dtype
            )
        super().__init__(network, eos, dtype, max_batch)

    @classmethod
    def of(cls, model: Any, tokenizer: Any = None, *, dtype: str = "float32", max_batch: int = 256) -> Self:
        """Return the model with the sizes and weights of transformers' MambaForCausalLM, and perhaps its tokenizer.

        ModelError if it is no such model.
        """
        config, weights = config_and_weights(model, "backbone", "lm_head")
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
        if config.get("hidden_act", "silu") != "silu":
            raise ModelError(f"the model has hidden_act={config['hidden_act']!r}; only silu is known")
        theirs, mixer = TheirWeights(config, weights, "backbone", "lm_head"), "layers.0.mixer"
        (inner, state), (_, _, kernel) = theirs.shape(f"{mixer}.A_log"), theirs.shape(f"{mixer}.conv1d.weight")
        made = cls(
            **theirs.sizes(),
            inner=inner,
            state=state,
            rank=theirs.shape(f"{mixer}.dt_proj.weight")[1],
            kernel=kernel,
            bias=f"{mixer}.in_proj.bias" in theirs.by_name,
            conv_bias=f"{mixer}.conv1d.bias" in theirs.by_name,
            dtype=dtype,
            max_batch=max_batch,
        )
        theirs.by_name = {
            name.replace("layers.", "blocks.", 1).replace(".mixer.", ".", 1): weight
            for name, weight in theirs.by_name.items()
        }
        theirs.copy_into(made._network)
        return made
