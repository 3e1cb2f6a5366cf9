"""Speech recognition by a transducer: an encoder of frames, a predictor of symbols, a joint network (Graves 2012)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn

from batchmaker.compile.declaration import Declared
from batchmaker.errors import OptionError
from batchmaker.graph.spec import ValueSpec
from batchmaker.lab.zoo.padding import NetworkModel, pad_frames
from batchmaker.lab.zoo.parts import DTYPES, check_positive, checked_frames, frozen, seeded
from batchmaker.lab.zoo.recurrent import LstmStack
from batchmaker.model.cell import Cell
from batchmaker.model.decisions import cond, while_loop
from batchmaker.model.recurrent_layers import recurrent

BLANK: Final = 0
"""No symbol: go on to the next frame. Also the predictor's input before the first symbol."""


@final
class Predictor(nn.Module):
    """One symbol: forward(symbol, h1, c1, ..., hL, cL) -> (g, and the state after it). g: for the joint network."""

    def __init__(self, vocabulary_size: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.stack = LstmStack(vocabulary_size, hidden, hidden, layers)
        self.project = nn.Linear(hidden, hidden, bias=False)

    def forward(self, symbol: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        state = self.stack(symbol, *state)
        return self.project(state[-2]), *state


@final
class Joint(nn.Module):
    """One decision of greedy decoding: forward(f, g, t, k, length) -> (symbol, emits, t, k, going).

    f: of frame t, from `Rnnt.listen`; g: of the symbols so far, from Predictor; both [n, hidden]. k: symbols written at
    this frame. symbol: the likeliest; emits: whether it is another than BLANK. After BLANK, and after `max_symbols`
    symbols, t goes on to the next frame. going: whether there is one. Numbers are int64 [n].
    """

    def __init__(self, vocabulary_size: int, hidden: int, max_symbols: int) -> None:
        super().__init__()
        self.max_symbols = max_symbols
        self.scores = nn.Linear(hidden, vocabulary_size)

    def forward(self, f: Tensor, g: Tensor, t: Tensor, k: Tensor, length: Tensor) -> tuple[Tensor, ...]:
        symbol = self.scores(torch.tanh(f + g)).argmax(-1)
        emits = symbol != BLANK
        k = torch.where(emits, k + 1, self.max_symbols)
        is_last = k >= self.max_symbols
        t = torch.where(is_last, t + 1, t)
        return symbol, emits, t, torch.where(is_last, 0, k), t < length


@final
class Rnnt(nn.Module):
    """The whole network. `listen` is the joint network's product with the encoder's outputs."""

    def __init__(
        self, pitches: int, vocabulary_size: int, hidden: int, layers: int, predictor_layers: int, max_symbols: int
    ) -> None:
        super().__init__()
        self.encoder = nn.LSTM(pitches, hidden, layers)
        self.listen = nn.Linear(hidden, hidden)
        self.predictor = Predictor(vocabulary_size, hidden, predictor_layers)
        self.joint = Joint(vocabulary_size, hidden, max_symbols)
        self._enliven()

    @torch.no_grad()
    def _enliven(self) -> None:
        """Draw weights by which the frames decide about the symbols, and many frames have none."""
        for name, weight in self.named_parameters():
            if weight.dim() > 1 and "embedding" not in name:
                weight.normal_(0, (6 if name.startswith("listen") else 2.5) / weight.shape[1] ** 0.5)
        self.joint.scores.bias[BLANK] = 3 * math.log(self.joint.scores.out_features) ** 0.5


class Hypothesis(NamedTuple):
    """The state of decoding: what Joint and Predictor gave last. state: the predictor's."""

    symbol: Any
    emits: Any
    t: Any
    k: Any
    going: Any
    g: Any
    state: Any


@final
class RnntModel(NetworkModel):
    """RNN-Transducer (Graves 2012; streaming: He et al. 2019): a spectrogram to symbols, which stream. Greedy decoding.

    A request is an array [frames, pitches] of floats, with at least one frame. The result is the symbols without
    blanks, int64 [n], at most `max_symbols` at each frame; there may be none. As a sequence a chunk is the next frames,
    and its result the symbols that they add: those of all chunks are those of the whole. vocabulary_size: with BLANK.
    hidden: width of all layers. layers: of the encoder, one cell each; predictor_layers: all in one cell. Other options
    as for LstmModel.
    """

    def __init__(
        self,
        pitches: int = 80,
        vocabulary_size: int = 128,
        hidden: int = 512,
        layers: int = 2,
        predictor_layers: int = 1,
        max_symbols: int = 5,
        dtype: str = "float32",
        max_batch: int = 256,
        seed: int = 0,
    ) -> None:
        check_positive(
            pitches=pitches, hidden=hidden, layers=layers, predictor_layers=predictor_layers, max_symbols=max_symbols
        )
        if vocabulary_size < 2:
            raise OptionError(f"vocabulary_size must be at least 2, BLANK and a symbol, got {vocabulary_size}")
        with seeded(seed):
            network = Rnnt(pitches, vocabulary_size, hidden, layers, predictor_layers, max_symbols)
        frozen(network, dtype)
        self._network = network
        self.encoder = recurrent(network.encoder, max_batch=max_batch)
        self.listen = Cell(network.listen, max_batch=max_batch)
        state = (ValueSpec((hidden,), dtype),) * (2 * predictor_layers)
        declared = Declared((ValueSpec((), "int64"), *state), (state[0], *state))
        self.predictor = Cell(network.predictor, max_batch=max_batch, priority=1, declared=declared)
        self.joint = Cell(network.joint, max_batch=max_batch, priority=1)
        self.pitches, self.max_symbols, self.dtype = pitches, max_symbols, dtype
        self.hidden, self.predictor_layers = hidden, predictor_layers
        self.example_request = np.zeros((3, pitches), np.float32)

    def unfold(self, request: Any) -> Any:
        """Return the symbols of an utterance [frames, pitches], int64 [n]."""
        return self.unfold_chunk(request, None)[0]

    def unfold_chunk(self, chunk: Any, state: Any) -> tuple[Any, Any]:
        """Return the symbols that the next frames [n, pitches] add. state: the encoder's, g and the predictor's."""
        frames = checked_frames(chunk, self.pitches, "the spectrogram")
        if state is None:
            g, *predicted = self.predictor.run([BLANK])
            state = None, g, tuple(predicted)
        heard, g, predicted = state
        x, heard = self.encoder(frames, heard)
        f, length = self.listen.map(x), len(frames)

        def body(now: Hypothesis) -> Hypothesis:
            """One step of the search: a symbol or the next frame. The predictor goes on only after a symbol."""
            symbol, emits, t, k, going = self.joint(f.at(now.t), now.g, now.t, now.k, length)

            def tell() -> tuple[Any, tuple[Any, ...]]:
                g, *predicted = self.predictor(symbol, *now.state)
                return g, tuple(predicted)

            g, predicted = cond(emits, tell, lambda: (now.g, now.state))
            return Hypothesis(symbol, emits, t, k, going, g, predicted)

        begin = Hypothesis(BLANK, False, 0, 0, True, g, predicted)
        last = while_loop(
            lambda now: now.going, body, begin, max_steps=self.max_symbols * length, collect=lambda now: now.emits
        )
        return last.symbol.steps, (heard, last.g, last.state)

    def length(self, request: Any) -> int:
        return len(checked_frames(request, self.pitches, "the spectrogram"))

    def batched(self, requests: Sequence[Any]) -> list[Any]:
        """Encode the padded batch, then decide for all that are not at their end; the predictor runs for who writes."""
        network: Rnnt = self._need_network()
        spectrograms = [checked_frames(request, self.pitches, "the spectrogram") for request in requests]
        frames, lengths = pad_frames(spectrograms, DTYPES[self.dtype])
        live, written = torch.arange(len(lengths)), [list[int]() for _ in requests]
        with torch.no_grad():
            f = network.listen(network.encoder(frames.transpose(0, 1))[0])
            nothing = f.new_zeros(len(lengths), self.hidden)
            g, *state = network.predictor(torch.full_like(lengths, BLANK), *(nothing,) * (2 * self.predictor_layers))
            state, t, k = [part.clone() for part in state], torch.zeros_like(lengths), torch.zeros_like(lengths)
            while len(live):
                symbol, emits, t, k, going = network.joint(f[t, live], g, t, k, lengths)
                which = emits.nonzero()[:, 0]
                if len(which):
                    g[which], *predicted = network.predictor(symbol[which], *(part[which] for part in state))
                    for part, new in zip(state, predicted, strict=True):
                        part[which] = new
                    for row, one in zip(live[which].tolist(), symbol[which].tolist(), strict=True):
                        written[row].append(one)
                if not going.all():
                    live, lengths, t, k, g, *state = [part[going] for part in (live, lengths, t, k, g, *state)]
        return [torch.tensor(symbols, dtype=torch.int64) for symbols in written]
