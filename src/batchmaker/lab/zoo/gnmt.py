"""Translation by deep LSTMs with attention and residual connections (GNMT, Wu et al. 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from batchmaker.errors import OptionError
from batchmaker.graph.spec import ValueSpec
from batchmaker.lab.zoo.attention import BLOCK, AdditiveAttention, remember, remember_cell
from batchmaker.lab.zoo.padding import NetworkModel, outputs_of, pad
from batchmaker.lab.zoo.parts import DTYPES, check_positive, checked_tokens, frozen, seeded
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
class FirstLayer(nn.Module):
    """One direction of the bidirectional first layer: forward(token, h, c) -> (h', c')."""

    def __init__(self, embedding: nn.Embedding, hidden: int) -> None:
        super().__init__()
        self.embedding = embedding
        self.lstm = nn.LSTMCell(embedding.embedding_dim, hidden)

    def forward(self, token: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        state: tuple[Tensor, Tensor] = self.lstm(self.embedding(token), (h, c))
        return state


@final
class SecondLayer(nn.Module):
    """The layer above both directions: forward(left, right, h, c) -> (h', c')."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTMCell(2 * hidden, hidden)

    def forward(self, left: Tensor, right: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        state: tuple[Tensor, Tensor] = self.lstm(torch.cat([left, right], -1), (h, c))
        return state


@final
class ResidualLayer(nn.Module):
    """Any layer from the third on: forward(x, h, c) -> (x + h', h', c')."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTMCell(hidden, hidden)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, c = self.lstm(x, (h, c))
        return x + h, h, c


@final
class Encoder(nn.Module):
    """All encoder layers, over a padded batch: tokens [longest, batch] -> [longest, batch, hidden]."""

    def __init__(self, vocabulary_size: int, hidden: int, layers: int) -> None:
        super().__init__()
        embedding = nn.Embedding(vocabulary_size, hidden)
        self.left = FirstLayer(embedding, hidden)
        self.right = FirstLayer(embedding, hidden)
        self.second = SecondLayer(hidden)
        self.residual = nn.ModuleList(ResidualLayer(hidden) for _ in range(layers - 2))

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        x = self.left.embedding(tokens)
        both = torch.cat([outputs_of(self.left.lstm, x), outputs_of(self.right.lstm, x, lengths)], -1)
        x = outputs_of(self.second.lstm, both)
        for layer in self.residual:
            x = x + outputs_of(layer.lstm, x)  # type: ignore[arg-type]
        return x


@final
class GnmtDecoder(nn.Module):
    """One step of the decoder.

    forward(word, h1, c1, ..., hL, cL, context, values, keys, count) -> (next word, and the same state after it). The
    bottom layer reads the last context; its output is the query for the next context, which all layers above read.
    """

    def __init__(self, vocabulary_size: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, hidden)
        self.layers = nn.ModuleList(nn.LSTMCell(2 * hidden, hidden) for _ in range(layers))
        self.attention = AdditiveAttention(hidden, hidden, hidden)
        self.project = nn.Linear(hidden, vocabulary_size)

    def forward(self, word: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Return the next word [n] int64 and the state after it.

        word: [n] int64. state: see the class, each [n, ...].
        """
        *recurrent, context, values, keys, count = state
        x = self.embedding(word)
        after: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            h, c = layer(torch.cat([x, context], -1), (recurrent[2 * number], recurrent[2 * number + 1]))
            after += (h, c)
            if number == 0:
                context = self.attention(h, values, keys, count)
            x = x + h if number > 1 else h
        return self.project(x).argmax(-1), *after, context, values, keys, count


@final
class Gnmt(nn.Module):
    """Encoder and decoder."""

    def __init__(self, vocabulary_size: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.encoder = Encoder(vocabulary_size, hidden, layers)
        self.decoder = GnmtDecoder(vocabulary_size, hidden, layers)


@final
class GnmtModel(NetworkModel):
    """GNMT: translates a sentence word by word; the words stream.

    The encoder's first layer runs in both directions, residual connections begin at the third layer of each side, and
    the decoder uses additive attention over the encoder's outputs. Each encoder layer is a cell (the first is two),
    `remember` and `remember_one` write their outputs into a memory of `positions` places, and one cell decodes a word.
    Requests as for Seq2SeqModel, of at most `positions` tokens. layers: of encoder and decoder, 2 or more; hidden: of
    all LSTMs and embeddings. Other options as for Seq2SeqModel.
    """

    optional_inputs = ("words",)
    sole_input = "source"

    def __init__(
        self,
        vocabulary_size: int = 32_000,
        hidden: int = 1024,
        layers: int = 8,
        positions: int = 80,
        dtype: str = "float32",
        max_batch: int = 128,
        max_words: int | None = None,
        until_eos: bool = True,
        seed: int = 0,
    ) -> None:
        check_positive(hidden=hidden, positions=positions, max_words=1 if max_words is None else max_words)
        check_vocabulary(vocabulary_size)
        if layers < 2:
            raise OptionError(f"layers must be at least 2, one in both directions and one above, got {layers}")
        with seeded(seed):
            network = Gnmt(vocabulary_size, hidden, layers)
        frozen(network, dtype)
        self._network = network
        encoder = network.encoder
        # All layers before the decoder have one priority. If upper layers went first, each request would run alone as
        # soon as it is a layer ahead of the others.
        self.left = Cell(encoder.left, max_batch=max_batch)
        self.right = Cell(encoder.right, max_batch=max_batch)
        self.second = Cell(encoder.second, max_batch=max_batch)
        for number, layer in enumerate(encoder.residual, start=3):
            setattr(self, f"layer_{number}", Cell(layer, max_batch=max_batch))
        for name, block in (("remember", BLOCK), ("remember_one", 1)):
            cell = remember_cell(
                network.decoder.attention.keys, places=positions, parts=1, block=block, dtype=dtype, max_batch=max_batch
            )
            setattr(self, name, cell)
        vector, memory = ValueSpec((hidden,), dtype), ValueSpec((positions, hidden), dtype)
        state = (*(vector,) * (2 * layers + 1), memory, memory, ValueSpec((), "int64"))
        self.decoder = decoder_cell(network.decoder, state, max_batch=max_batch, priority=1)
        self.vocabulary_size, self.hidden, self.layers, self.dtype = vocabulary_size, hidden, layers, dtype
        self.positions, self.max_words, self.until_eos = positions, max_words, until_eos
        self.example_request = {"source": [BOS] * min(BLOCK + 1, positions), "words": 2}

    def unfold(self, request: Any) -> Any:
        """Return the words of a translation, int64 [n]; a request `{"source": ..., "words": n}` sets n."""
        order = self._parse(request)
        cells = self.cells
        left, right = self.left.run(order.source)[0], self.right.run(order.source[::-1])[0]
        x = self.second.run((left.steps, right.steps[::-1]))[0]
        for number in range(3, self.layers + 1):
            x = cells[f"layer_{number}"].run(x.steps)[0]
        memory = remember(cells["remember"], cells["remember_one"], (x.steps,))
        state = (None,) * (2 * self.layers + 1)
        word = self.decoder.loop((BOS, *state, *memory), until=order.until, max_steps=order.words)[0]
        return word.steps

    def length(self, request: Any) -> int:
        return len(self._parse(request).source)

    def batched(self, requests: Sequence[Any]) -> list[Any]:
        """Encode the padded batch, then decode all rows until the last one ends; each keeps its own words."""
        orders = [self._parse(request) for request in requests]
        network: Gnmt = self._need_network()
        tokens, lengths = pad([order.source for order in orders])
        decoder = network.decoder
        with torch.no_grad():
            values = network.encoder(tokens, lengths).transpose(0, 1)
            zeros = torch.zeros(len(orders), self.hidden, dtype=DTYPES[self.dtype])
            state = [zeros] * (2 * self.layers + 1) + [values, decoder.attention.keys(values), lengths]

            def step(words: Tensor) -> Tensor:
                words, *state[:] = decoder(words, *state)
                return words

            return write(step, [order.words for order in orders], [order.until for order in orders])

    def _parse(self, request: Any) -> Order:
        tokens, words, until = read_order(request, until_eos=self.until_eos)
        source = checked_tokens(tokens, self.vocabulary_size, "the source")
        check_places("tokens of the source", len(source), self.positions)
        return Order(source, words or self.max_words or 2 * len(source) + 10, until)
