"""BERT: a Transformer encoder over a padded text (Devlin et al. 2019)."""

from __future__ import annotations

from typing import Any, Literal, final

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from batchmaker.errors import InvalidRequestError, OptionError
from batchmaker.lab.zoo.attention import used
from batchmaker.lab.zoo.parts import check_choice, check_positive, checked_tokens, frozen, seeded
from batchmaker.lab.zoo.transformer import MultiHeadAttention
from batchmaker.model.layers import Layered

Output = Literal["pooled", "states"]


@final
class Embeddings(nn.Module):
    """words [n, places] -> [n, places, width]: the normalised sum of word, place and (first) segment embeddings."""

    def __init__(self, vocabulary_size: int, width: int, places: int, segments: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary_size, width)
        self.places = nn.Embedding(places, width)
        self.segments = nn.Embedding(segments, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places.weight[: words.shape[1]] + self.segments.weight[0]
        result: Tensor = self.norm(x)
        return result


@final
class Attention(nn.Module):
    """Attention of every place to the first `count`, added and normalised: forward(x, count) -> x."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(width, heads)
        self.norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        own = self.attention
        result: Tensor = self.norm(x + own(x, own.key(x), own.value(x), used(count, x.shape[1])))
        return result


@final
class BertFeedForward(nn.Module):
    """Each place by itself, added and normalised: x -> norm(x + W2 gelu(W1 x))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, inner)
        self.out = nn.Linear(inner, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(x + self.out(F.gelu(self.inner(x))))
        return result


@final
class BertLayer(nn.Module):
    """forward(x, count) -> x."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.feed_forward = BertFeedForward(width, inner)

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        result: Tensor = self.feed_forward(self.attention(x, count))
        return result


@final
class Pooler(nn.Module):
    """The first place of the last layer, through a dense layer and tanh: [n, places, width] -> [n, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.dense(x[:, 0]).tanh()
        return result


@final
class Bert(nn.Module):
    """forward(words, count) -> pooled [n, width], or the states of all places [n, places, width].

    words: [n, places] int64; the first `count` [n] are used.
    """

    def __init__(
        self, vocabulary_size: int, width: int, heads: int, inner: int, layers: int, places: int, output: Output
    ) -> None:
        super().__init__()
        self.embeddings = Embeddings(vocabulary_size, width, places, 2)
        self.encoder = nn.ModuleList(BertLayer(width, heads, inner) for _ in range(layers))
        self.pooler = Pooler(width)
        self.output = output
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, words: Tensor, count: Tensor) -> Tensor:
        x: Tensor = self.embeddings(words)
        for layer in self.encoder:
            x = layer(x, count)
        return self.pooler(x) if self.output == "pooled" else x


@final
class BertModel(Layered):
    """BERT: a text to a vector. A request is a list of at most `length` token ids, padded to `length` with a mask.

    output: "pooled", the vector of the first token [hidden], or "states" of all places [length, hidden]; those beyond
    the text have no meaning. split: two cells for each layer, attention and feed-forward, instead of one. positions:
    places with an embedding. heads, inner, layers: of the encoder. Other options as for LstmModel.
    """

    def __init__(
        self,
        vocabulary_size: int = 30_522,
        hidden: int = 768,
        heads: int = 12,
        inner: int = 3072,
        layers: int = 12,
        length: int = 128,
        positions: int = 512,
        output: Output = "pooled",
        split: bool = False,
        dtype: str = "float32",
        max_batch: int = 16,
        seed: int = 0,
    ) -> None:
        check_positive(
            vocabulary_size=vocabulary_size, hidden=hidden, heads=heads, inner=inner, layers=layers, length=length
        )
        check_choice("output", output, ("pooled", "states"))
        if hidden % heads:
            raise OptionError(f"hidden must be a multiple of heads, got {hidden} and {heads}")
        if length > positions:
            raise OptionError(f"length must be at most positions, got {length} and {positions}")
        with seeded(seed):
            network = Bert(vocabulary_size, hidden, heads, inner, layers, positions, output)
        self.vocabulary_size, self.places = vocabulary_size, length
        parts: list[type[nn.Module]] = [Attention, BertFeedForward] if split else [BertLayer]
        super().__init__(frozen(network, dtype), [0, 0], cut=[Embeddings, *parts, Pooler], max_batch=max_batch)

    def given(self, request: Any) -> tuple[Any, ...]:
        """Return the padded words, [length] int64, and their number.

        InvalidRequestError for tokens out of range, and for a text longer than `length`.
        """
        tokens = checked_tokens(request, self.vocabulary_size, "the text")
        if len(tokens) > self.places:
            raise InvalidRequestError(
                f"the text has {len(tokens)} tokens, the network takes {self.places} (option length)"
            )
        words = np.zeros(self.places, np.int64)
        words[: len(tokens)] = tokens
        return words, len(tokens)
