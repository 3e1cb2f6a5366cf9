"""Speech recognition by attention: a pyramid of LSTMs as encoder, another LSTM as decoder (Chan et al. 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from batchmaker.errors import InvalidRequestError
from batchmaker.graph.spec import ValueSpec
from batchmaker.lab.zoo.attention import BLOCK, DotAttention, remember, remember_cell
from batchmaker.lab.zoo.padding import NetworkModel, outputs_of, pad_frames
from batchmaker.lab.zoo.parts import DTYPES, check_positive, checked_frames, frozen, seeded
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
class Direction(nn.Module):
    """One direction of a listener's layer: forward(input 1, ..., h, c) -> (h, c).

    Inputs are concatenated: a frame, or both directions of two steps of the layer below.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTMCell(width, hidden)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        *parts, h, c = inputs
        state: tuple[Tensor, Tensor] = self.lstm(torch.cat(parts, -1), (h, c))
        return state


@final
class Listener(nn.Module):
    """A bidirectional LSTM and `pyramid` more; each of them joins two steps of the one below into one."""

    def __init__(self, pitches: int, hidden: int, pyramid: int) -> None:
        super().__init__()
        widths = [pitches, *[4 * hidden] * pyramid]
        self.left = nn.ModuleList(Direction(width, hidden) for width in widths)
        self.right = nn.ModuleList(Direction(width, hidden) for width in widths)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """x: [longest, n, pitches] -> [longest, n, 2 hidden] of the top, and its lengths."""
        pairs: list[Any] = list(zip(self.left, self.right, strict=True))
        for number, (left, right) in enumerate(pairs):
            if number:
                lengths = lengths // 2
                even = len(x) - len(x) % 2
                x = torch.cat([x[0:even:2], x[1:even:2]], -1)
            x = torch.cat([outputs_of(left.lstm, x), outputs_of(right.lstm, x, lengths)], -1)
        return x, lengths


@final
class Speller(nn.Module):
    """One step: forward(character, h1, c1, ..., hL, cL, context, values, keys, count) -> (next one, the same state).

    The bottom layer reads the last character and context. The output of the top layer is the query for the next
    context, and both together give the next character.
    """

    def __init__(self, vocabulary_size: int, hidden: int, layers: int, memory: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, hidden)
        widths = [hidden + memory, *[hidden] * (layers - 1)]
        self.layers = nn.ModuleList(nn.LSTMCell(width, hidden) for width in widths)
        self.attention = DotAttention(hidden, memory, hidden)
        self.project = nn.Linear(hidden + memory, vocabulary_size)

    def forward(self, character: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Return the next character [n] int64 and the state after it.

        character: [n] int64. state: see the class, each [n, ...].
        """
        *recurrent, context, values, keys, count = state
        x = torch.cat([self.embedding(character), context], -1)
        after: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            x, c = layer(x, (recurrent[2 * number], recurrent[2 * number + 1]))
            after += (x, c)
        context = self.attention(x, values, keys, count)
        scores = self.project(torch.cat([x, context], -1))
        return scores.argmax(-1), *after, context, values, keys, count


@final
class Las(nn.Module):
    """Listener and speller."""

    def __init__(
        self, pitches: int, vocabulary_size: int, listener: int, pyramid: int, hidden: int, layers: int
    ) -> None:
        super().__init__()
        self.listener = Listener(pitches, listener, pyramid)
        self.speller = Speller(vocabulary_size, hidden, layers, 2 * listener)


@final
class LasModel(NetworkModel):
    """Listen, Attend and Spell: a spectrogram to characters; the characters stream.

    A request is an array [frames, pitches] of floats, decoded until EOS or `max_words` characters (None: twice the
    listener's number of steps and ten more); or {"source": array, "words": n} for exactly n characters. It must have at
    least one and at most `positions` steps at the top of the pyramid, each of 2^pyramid frames. listener: width of each
    direction; hidden, layers: of the speller. Each direction of each layer is a cell, `remember` and `remember_one`
    write their outputs into a memory, and one cell decodes a character. Other options as for Seq2SeqModel.
    """

    optional_inputs = ("words",)
    sole_input = "source"

    def __init__(
        self,
        pitches: int = 40,
        vocabulary_size: int = 32,
        listener: int = 256,
        pyramid: int = 3,
        hidden: int = 512,
        layers: int = 2,
        positions: int = 200,
        dtype: str = "float32",
        max_batch: int = 128,
        max_words: int | None = None,
        until_eos: bool = True,
        seed: int = 0,
    ) -> None:
        check_positive(
            pitches=pitches,
            listener=listener,
            pyramid=pyramid,
            hidden=hidden,
            layers=layers,
            positions=positions,
            max_words=1 if max_words is None else max_words,
        )
        check_vocabulary(vocabulary_size)
        with seeded(seed):
            network = Las(pitches, vocabulary_size, listener, pyramid, hidden, layers)
        frozen(network, dtype)
        self._network = network
        pairs = zip(network.listener.left, network.listener.right, strict=True)
        # All layers before the decoder have one priority. If upper layers went first, each request would run alone as
        # soon as it is a layer ahead of the others.
        for number, (left, right) in enumerate(pairs):
            setattr(self, f"left_{number}", Cell(left, max_batch=max_batch))
            setattr(self, f"right_{number}", Cell(right, max_batch=max_batch))
        for name, block in (("remember", BLOCK), ("remember_one", 1)):
            cell = remember_cell(
                network.speller.attention.keys, places=positions, parts=2, block=block, dtype=dtype, max_batch=max_batch
            )
            setattr(self, name, cell)
        vector = ValueSpec((hidden,), dtype)
        values, keys = ValueSpec((positions, 2 * listener), dtype), ValueSpec((positions, hidden), dtype)
        context = ValueSpec((2 * listener,), dtype)
        state = (*(vector,) * (2 * layers), context, values, keys, ValueSpec((), "int64"))
        self.speller = decoder_cell(network.speller, state, max_batch=max_batch, priority=1)
        self.pitches, self.pyramid, self.listener = pitches, pyramid, listener
        self.hidden, self.layers, self.dtype = hidden, layers, dtype
        self.positions, self.max_words, self.until_eos = positions, max_words, until_eos
        steps = min(BLOCK + 1, positions) << pyramid
        self.example_request = {"source": np.zeros((steps, pitches), np.float32), "words": 2}

    def unfold(self, request: Any) -> Any:
        """Return the characters of an utterance [frames, pitches], int64 [n]; `{"source": ..., "words": n}` sets n."""
        order, cells = self._parse(request), self.cells
        zeros = np.zeros(self.listener, np.float32)
        inputs: tuple[Any, ...] = (order.source,)
        for number in range(self.pyramid + 1):
            if number:
                even = len(inputs[0]) - len(inputs[0]) % 2
                inputs = tuple(side[at:even:2] for at in range(2) for side in inputs)
            left = cells[f"left_{number}"].run(inputs, (zeros, zeros))[0].steps
            right = cells[f"right_{number}"].run(tuple(side[::-1] for side in inputs), (zeros, zeros))[0].steps
            inputs = left, right[::-1]
        memory = remember(cells["remember"], cells["remember_one"], inputs)
        state = (BOS, *(None,) * (2 * self.layers + 1), *memory)
        return self.speller.loop(state, until=order.until, max_steps=order.words)[0].steps

    def length(self, request: Any) -> int:
        return len(self._parse(request).source)

    def batched(self, requests: Sequence[Any]) -> list[Any]:
        """Encode the padded batch, then decode all rows until the last one ends; each keeps its own characters."""
        orders = [self._parse(request) for request in requests]
        network: Las = self._need_network()
        frames, lengths = pad_frames([order.source for order in orders], DTYPES[self.dtype])
        speller = network.speller
        with torch.no_grad():
            heard, count = network.listener(frames.transpose(0, 1), lengths)
            values = heard.transpose(0, 1)
            widths = [self.hidden] * (2 * self.layers) + [2 * self.listener]
            state = [torch.zeros(len(orders), width, dtype=values.dtype) for width in widths]
            state += [values, speller.attention.keys(values), count]

            def step(characters: Tensor) -> Tensor:
                characters, *state[:] = speller(characters, *state)
                return characters

            return write(step, [order.words for order in orders], [order.until for order in orders])

    def _parse(self, request: Any) -> Order:
        frames, words, until = read_order(request, until_eos=self.until_eos)
        source: NDArray[np.float32] = checked_frames(frames, self.pitches, "the spectrogram")
        steps = len(source) >> self.pyramid
        if steps < 1:
            raise InvalidRequestError(
                f"the spectrogram has {len(source)} frames, the pyramid takes at least {1 << self.pyramid}"
            )
        check_places(f"frames of the spectrogram, in {1 << self.pyramid}s", steps, self.positions)
        return Order(source, words or self.max_words or 2 * steps + 10, until)
