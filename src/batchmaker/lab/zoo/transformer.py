"""The Transformer: an encoder over the whole source, a decoder that feeds itself (Vaswani et al. 2017)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchmaker.errors import OptionError
from batchmaker.graph.spec import ValueSpec
from batchmaker.lab.zoo.attention import used
from batchmaker.lab.zoo.padding import NetworkModel, pad
from batchmaker.lab.zoo.parts import check_positive, checked_tokens, frozen, seeded
from batchmaker.lab.zoo.translation import (
    BOS,
    Order,
    check_places,
    check_vocabulary,
    decoder_cell,
    read_order,
    write,
)
from batchmaker.model.cell import Cell


@final
class MultiHeadAttention(nn.Module):
    """forward(x, keys, values, mask) -> [n, queries, width] (Vaswani et al. 2017, section 3.2.2).

    x: [n, queries, width]. keys, values: [n, places, width], from `key` and `value`. mask: bool [n, places], the places
    that may be used.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        queries, keys, values = map(self._split, (self.query(x), keys, values))
        heads = F.scaled_dot_product_attention(queries, keys, values, mask[:, None, None])
        result: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return result

    def _split(self, x: Tensor) -> Tensor:
        """[n, places, width] -> [n, heads, places, width / heads]."""
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


@final
class ReluFeedForward(nn.Module):
    """x -> W2 relu(W1 x)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, inner)
        self.out = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.inner(x).relu())
        return result


@final
class TransformerLayer(nn.Module):
    """forward(x, count) -> x: attention of every place to the first `count`, then each place by itself.

    x: [n, places, width]. count: [n] int64. Places beyond `count` are never used.
    """

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(width, heads)
        self.attention_norm = nn.LayerNorm(width)
        self.feed_forward = ReluFeedForward(width, inner)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        own = self.attention
        x = self.attention_norm(x + own(x, own.key(x), own.value(x), used(count, x.shape[1])))
        result: Tensor = self.norm(x + self.feed_forward(x))
        return result


@final
class DecoderLayer(nn.Module):
    """One layer of the decoder, for one new place: attention to the places before, to the source, then by itself."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(width, heads)
        self.attention_norm = nn.LayerNorm(width)
        self.source_attention = MultiHeadAttention(width, heads)
        self.source_norm = nn.LayerNorm(width)
        self.feed_forward = ReluFeedForward(width, inner)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor, Tensor], source: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """x: [n, 1, width]. past, source: keys, values and mask, as MultiHeadAttention takes them."""
        x = self.attention_norm(x + self.attention(x, *past))
        x = self.source_norm(x + self.source_attention(x, *source))
        result: Tensor = self.norm(x + self.feed_forward(x))
        return result


@final
class Embed(nn.Module):
    """Embeddings of words and places: sqrt(width) embedding[word] + sines and cosines of the place (section 3.5)."""

    def __init__(self, embedding: nn.Embedding, places: int) -> None:
        super().__init__()
        self.embedding = embedding
        self.places: Tensor
        self.register_buffer("places", sines(places, embedding.embedding_dim))

    def forward(self, words: Tensor) -> Tensor:
        """words: [n, places] int64 -> [n, places, width]."""
        return self.scaled(words) + self.places[: words.shape[1]]

    def scaled(self, words: Tensor) -> Tensor:
        x: Tensor = self.embedding(words) * math.sqrt(self.embedding.embedding_dim)
        return x


def sines(places: int, width: int) -> Tensor:
    """Return the encoding of places [places, width]: sin and cos of place / 10000^(2i / width), one after the other."""
    angles = torch.arange(places)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    return torch.stack([angles.sin(), angles.cos()], 2).flatten(1)


@final
class SourceProjections(nn.Module):
    """Keys and values of the source for the decoder's layers: forward(x) -> both, [n, layers, places, width]."""

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer.source_attention for layer in layers)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        keys = torch.stack([layer.key(x) for layer in self.layers], 1)  # type: ignore[operator]
        values = torch.stack([layer.value(x) for layer in self.layers], 1)  # type: ignore[operator]
        return keys, values


@final
class TransformerDecoder(nn.Module):
    """One step of the decoder.

    forward(word, place, keys 1, values 1, ..., keys L, values L, source keys, source values, count) -> (next word, and
    the same state after it). place: words written so far, [n] int64. keys, values: [n, places, width], filled up to
    `place`. source keys, values, count: from SourceProjections, passed through.
    """

    def __init__(self, embed: Embed, project: nn.Linear, layers: Sequence[DecoderLayer]) -> None:
        super().__init__()
        self.embed = embed
        self.project = project
        self.layers = nn.ModuleList(layers)

    def forward(self, word: Tensor, place: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Return the next word [n] int64 and the state after it.

        word, place: [n] int64. state: see the class, each [n, ...].
        """
        *past, source_keys, source_values, count = state
        x = (self.embed.scaled(word) + self.embed.places[place])[:, None]
        past_mask, visible = used(place + 1, past[0].shape[1]), used(count, source_keys.shape[2])
        at = place[:, None, None].expand(-1, 1, x.shape[2])
        after: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            keys = past[2 * number].scatter(1, at, layer.attention.key(x))  # type: ignore[operator, union-attr]
            values = past[2 * number + 1].scatter(1, at, layer.attention.value(x))  # type: ignore[operator, union-attr]
            after += (keys, values)
            x = layer(x, (keys, values, past_mask), (source_keys[:, number], source_values[:, number], visible))
        return self.project(x[:, 0]).argmax(-1), place + 1, *after, source_keys, source_values, count


@final
class Transformer(nn.Module):
    """The whole network. Embeddings of both sides and the output share their weights (section 3.4)."""

    def __init__(self, vocabulary_size: int, width: int, heads: int, inner: int, layers: int, places: int) -> None:
        super().__init__()
        embedding = nn.Embedding(vocabulary_size, width)
        nn.init.normal_(embedding.weight, std=width**-0.5)
        self.embed = Embed(embedding, places)
        self.project = nn.Linear(width, vocabulary_size, bias=False)
        self.project.weight = embedding.weight
        self.encoder = nn.ModuleList(TransformerLayer(width, heads, inner) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderLayer(width, heads, inner) for _ in range(layers))

    def encode(self, words: Tensor, count: Tensor) -> Tensor:
        """words: [n, longest] -> [n, longest, width]."""
        x: Tensor = self.embed(words)
        for layer in self.encoder:
            x = layer(x, count)
        return x


@final
class TransformerModel(NetworkModel):
    """The Transformer: translates a sentence word by word; the words stream.

    The source is padded to `positions` places, with a mask. A cell embeds it, one cell for each layer encodes it,
    `memory` makes the keys and values for the decoder's layers, and one cell decodes a word. Keys and values of the
    words so far are its state, with room for `positions` of them. Requests as for Seq2SeqModel, of at most `positions`
    tokens and words. hidden: the width of the model; inner: of its feed-forward layers. Other options as for
    Seq2SeqModel.
    """

    optional_inputs = ("words",)
    sole_input = "source"

    def __init__(
        self,
        vocabulary_size: int = 37_000,
        hidden: int = 512,
        heads: int = 8,
        inner: int = 2048,
        layers: int = 6,
        positions: int = 80,
        dtype: str = "float32",
        max_batch: int = 64,
        max_words: int | None = None,
        until_eos: bool = True,
        seed: int = 0,
    ) -> None:
        check_positive(
            hidden=hidden,
            heads=heads,
            inner=inner,
            layers=layers,
            positions=positions,
            max_words=1 if max_words is None else max_words,
        )
        check_vocabulary(vocabulary_size)
        if hidden % (2 * heads):
            raise OptionError(f"hidden must be a multiple of twice the heads, got {hidden} and {heads} heads")
        with seeded(seed):
            network = Transformer(vocabulary_size, hidden, heads, inner, layers, positions)
        frozen(network, dtype)
        self._network = network
        self.embed = Cell(network.embed, max_batch=max_batch)
        for number, layer in enumerate(network.encoder, start=1):
            setattr(self, f"layer_{number}", Cell(layer, max_batch=max_batch, priority=number))
        decoder: list[Any] = list(network.decoder)
        self.memory = Cell(SourceProjections(decoder).eval(), max_batch=max_batch, priority=layers + 1)
        place, past = ValueSpec((), "int64"), ValueSpec((positions, hidden), dtype)
        source = ValueSpec((layers, positions, hidden), dtype)
        state = (place, *(past,) * (2 * layers), source, source, ValueSpec((), "int64"))
        step = TransformerDecoder(network.embed, network.project, decoder).eval()
        self.decoder = decoder_cell(step, state, max_batch=max_batch, priority=layers + 2)
        self.vocabulary_size, self.hidden, self.layers, self.dtype = vocabulary_size, hidden, layers, dtype
        self.positions, self.max_words, self.until_eos = positions, max_words, until_eos
        self.example_request = {"source": [BOS, BOS], "words": min(2, positions)}

    def unfold(self, request: Any) -> Any:
        """Return the words of a translation, int64 [n]; a request `{"source": ..., "words": n}` sets n."""
        order = self._parse(request)
        words = np.zeros(self.positions, np.int64)
        words[: len(order.source)] = order.source
        count = len(order.source)
        x, cells = self.embed(words), self.cells
        for number in range(1, self.layers + 1):
            x = cells[f"layer_{number}"](x, count)
        past = (None,) * (2 * self.layers + 1)
        state = (BOS, *past, *self.memory(x), count)
        return self.decoder.loop(state, until=order.until, max_steps=order.words)[0].steps

    def length(self, request: Any) -> int:
        return len(self._parse(request).source)

    def batched(self, requests: Sequence[Any]) -> list[Any]:
        """Encode the padded batch, then decode all rows until the last one ends; each keeps its own words."""
        orders = [self._parse(request) for request in requests]
        network: Transformer = self._need_network()
        tokens, lengths = pad([order.source for order in orders])
        with torch.no_grad():
            x = network.encode(tokens.T, lengths)
            visible = used(lengths, x.shape[1])
            layers: list[Any] = list(network.decoder)
            source = [(own.key(x), own.value(x), visible) for own in (layer.source_attention for layer in layers)]
            nothing = x[:, :0]
            past = [(nothing, nothing)] * len(layers)  # keys and values, [batch, words so far, width]

            def step(words: Tensor) -> Tensor:
                written = past[0][0].shape[1]
                x = (network.embed.scaled(words) + network.embed.places[written])[:, None]
                past_mask = torch.ones(len(words), written + 1, dtype=torch.bool)
                for number, layer in enumerate(layers):
                    keys = torch.cat([past[number][0], layer.attention.key(x)], 1)
                    values = torch.cat([past[number][1], layer.attention.value(x)], 1)
                    past[number] = keys, values
                    x = layer(x, (keys, values, past_mask), source[number])
                best: Tensor = network.project(x[:, 0]).argmax(-1)
                return best

            return write(step, [order.words for order in orders], [order.until for order in orders])

    def _parse(self, request: Any) -> Order:
        tokens, words, until = read_order(request, until_eos=self.until_eos)
        source = checked_tokens(tokens, self.vocabulary_size, "the source")
        check_places("tokens of the source", len(source), self.positions)
        if words is None:
            words = min(self.max_words or 2 * len(source) + 10, self.positions)
        check_places("words", words, self.positions)
        return Order(source, words, until)
