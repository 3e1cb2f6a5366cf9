"""Translation with attention (Luong et al. 2015) and beam search: a row of the decoder is a whole beam."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from batchmaker.compiled import compiled
from batchmaker.errors import OptionError
from batchmaker.lab.zoo.padding import PaddedModel, final_states, fused, pad
from batchmaker.lab.zoo.parts import WordIds, check_positive, checked_tokens, frozen, seeded
from batchmaker.lab.zoo.recurrent import OneLstm
from batchmaker.lab.zoo.seq2seq import Pair
from batchmaker.lab.zoo.translation import BOS, EOS, Order, check_vocabulary, read_order
from batchmaker.model.cell import Cell

_NEVER: Final = -1
"""In place of EOS for requests that no word ends."""


@final
class BeginBeam(nn.Module):
    """(h, c) [n, hidden] -> what a beam is before its first step: (choice, score, h, c, length), each [n, beam, ...].

    The first hypothesis has score 0 and all others -inf, so that the first step takes the likeliest words of one.
    """

    scores: Tensor

    def __init__(self, beam: int) -> None:
        super().__init__()
        self.beam = beam
        self.register_buffer("scores", torch.tensor([0.0] + [-math.inf] * (beam - 1)), persistent=False)

    def forward(self, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        count, beam = h.shape[0], self.beam
        choice = torch.full((count, beam), BOS)
        wide = [part[:, None].expand(-1, beam, -1).clone() for part in (h, c)]
        return choice, self.scores.expand(count, -1).clone(), *wide, torch.zeros_like(choice)


@final
class BeamStep(nn.Module):
    """One step of all hypotheses of a beam: (choice, memory, number, score, h, c, length, end) -> (done, state...).

    An LSTM reads the last word; its h attends to the encoder's steps, `memory` [n, room, hidden], of which the first
    `number` [n] are there: a = softmax(h W memory), h' = tanh(W [a memory; h]), and words by h' (sections 3 and 3.1,
    score "general"). The state is [n, beam, ...], `end` [n]. choice: where a hypothesis comes from and its last word,
    parent * words + word. score: log probability. length: words without those after `end`. A hypothesis that has the
    word `end` keeps its score. done: whether all have ended, [n] bool.
    """

    def __init__(self, vocabulary_size: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.words = vocabulary_size
        self.embedding = nn.Embedding(vocabulary_size, embedding)
        self.lstm = nn.LSTMCell(embedding, hidden)
        self.attend = nn.Linear(hidden, hidden, bias=False)
        self.combine = nn.Linear(2 * hidden, hidden, bias=False)
        self.project = nn.Linear(hidden, vocabulary_size)

    def forward(
        self,
        choice: Tensor,
        memory: Tensor,
        number: Tensor,
        score: Tensor,
        h: Tensor,
        c: Tensor,
        length: Tensor,
        end: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return done [n] bool, and the state after the step; shapes as above."""
        (count, beam), words = choice.shape, self.words
        word = choice % words
        h, c = self.lstm(self.embedding(word).flatten(0, 1), (h.flatten(0, 1), c.flatten(0, 1)))
        h, c = h.view(count, beam, -1), c.view(count, beam, -1)
        scores = self.attend(h) @ memory.transpose(1, 2)
        is_step = torch.arange(memory.shape[1]) < number[:, None]
        context = scores.masked_fill(~is_step[:, None], -math.inf).softmax(-1) @ memory
        logits = self.project(self.combine(torch.cat((context, h), -1)).tanh())
        rises = logits.float().log_softmax(-1)
        ended = word == end[:, None]
        only_eos = torch.full((words,), -math.inf)
        only_eos[EOS] = 0.0
        rises = torch.where(ended[:, :, None], only_eos, rises)
        score, choice = (score[:, :, None] + rises).flatten(1).topk(beam, -1)
        parent = choice // words
        length = (length + ~ended).gather(1, parent)
        rows = parent[:, :, None].expand(-1, -1, h.shape[2])
        done = (choice % words == end[:, None]).all(1)
        return done, choice, score, h.gather(1, rows), c.gather(1, rows), length, end


@final
class AttentionSeq2SeqModel(PaddedModel):
    """Translates a sentence by beam search with attention to its words.

    A request is a list of source ids, translated until EOS or `max_words` (None: twice the source and ten more); or
    {"source": ids, "words": n} for exactly n words, with or without EOS. Returns the words of the best hypothesis,
    int64, EOS included; they do not stream, since they are known at the end. beam: number of hypotheses. The best has
    the largest log probability / ((5 + words) / 6)^length_penalty (Wu et al. 2016, section 7). The encoder is an LSTM
    of one layer. Other options as for Seq2SeqModel.
    """

    optional_inputs = ("words",)
    sole_input = "source"

    def __init__(
        self,
        vocabulary_size: int = 30_000,
        hidden: int = 512,
        embedding: int | None = None,
        beam: int = 4,
        length_penalty: float = 0.6,
        dtype: str = "float32",
        max_batch: int = 128,
        max_words: int | None = None,
        until_eos: bool = True,
        seed: int = 0,
    ) -> None:
        width = hidden if embedding is None else embedding
        check_positive(hidden=hidden, embedding=width, beam=beam, max_words=1 if max_words is None else max_words)
        check_vocabulary(vocabulary_size)
        if beam > vocabulary_size:
            raise OptionError(f"beam must be at most vocabulary_size, {vocabulary_size}, got {beam}")
        with seeded(seed):
            encoder = OneLstm(vocabulary_size, width, hidden, 1)
            step = BeamStep(vocabulary_size, width, hidden)
        self.encoder = Cell(frozen(encoder, dtype), max_batch=max_batch)
        self.begin = Cell(BeginBeam(beam).eval(), max_batch=max_batch, priority=1)
        self.step = Cell(frozen(step, dtype), max_batch=max_batch, priority=1, memory="memory")
        self.vocabulary_size, self.max_words, self.until_eos = vocabulary_size, max_words, until_eos
        self.length_penalty = float(length_penalty)
        self._layers = fused(list(encoder.layers))  # type: ignore[arg-type]
        self.example_request = {"source": [BOS, EOS], "words": 2}

    def _prepare(self) -> None:
        """Nothing is derived."""

    def encode(self, pair: Pair, vocabulary: WordIds) -> dict[str, Any]:
        """Return the request for a pair, with the number of words in its translation."""
        return {"source": vocabulary.encode_words(pair.source_tokens), "words": len(pair.target_tokens)}

    def unfold(self, request: Any) -> Any:
        """Return the words of the best hypothesis, int64 [words]."""
        order = self._parse(request)
        h, c = self.encoder.run(order.source)
        state = (*self.begin(h, c), _NEVER if order.until is None else order.until)
        _, choice, score, _, _, length, _ = self.step.loop(
            state, until={0: True}, max_steps=order.words, memory=h.steps
        )
        choices, scores, lengths = yield choice.steps, score, length
        return self._best(np.asarray(choices), np.asarray(scores), np.asarray(lengths))

    def length(self, request: Any) -> int:
        """Return the number of source words."""
        return len(self._parse(request).source)

    def batched(self, requests: Sequence[Any]) -> list[Any]:
        """Encode the padded batch, then decode all beams until the last one ends; each keeps its own steps."""
        orders = [self._parse(request) for request in requests]
        tokens, lengths = pad([order.source for order in orders])
        step: Any = self.step.module
        with torch.no_grad():
            layers, x = self._need_layers(), self.encoder.module.embedding(tokens)  # type: ignore[operator]
            memory = layers(x)[0].transpose(0, 1).contiguous()
            h, c = final_states(layers, x, lengths)
            ends = torch.tensor([_NEVER if order.until is None else order.until for order in orders])
            most = torch.tensor([order.words for order in orders])
            begun: tuple[Tensor, ...] = self.begin.module(h[0], c[0])
            choice, *state = (*begun, ends)
            choices, scores, counts = list[Tensor](), *[torch.empty(len(orders), self._beam) for _ in range(2)]
            while bool((most > len(choices)).any()):
                done, choice, *state = step(choice, memory, lengths, *state)
                choices.append(choice)
                most = torch.where(done, most.clamp(max=len(choices)), most)
                last = most == len(choices)
                scores[last], counts[last] = state[0][last], state[3][last].to(scores.dtype)
        every = torch.stack(choices, 1).numpy()
        parts = zip(every, most.tolist(), scores.numpy(), counts.numpy(), strict=True)
        return [self._best(row[:count], score, length) for row, count, score, length in parts]

    @property
    def _beam(self) -> int:
        beam: int = self.begin.module.beam  # type: ignore[assignment]
        return beam

    def _best(self, choices: NDArray[np.int64], scores: NDArray[Any], lengths: NDArray[Any]) -> Tensor:
        """Return the words of the best hypothesis. choices: [steps, beam]. scores, lengths: [beam]."""
        best = int(np.argmax(scores / ((5 + lengths) / 6) ** self.length_penalty))
        words = traced_back(np.ascontiguousarray(choices), best, self.vocabulary_size)
        return torch.from_numpy(words)[: int(lengths[best])]

    def _parse(self, request: Any) -> Order:
        tokens, words, until = read_order(request, until_eos=self.until_eos)
        source = checked_tokens(tokens, self.vocabulary_size, "the source")
        return Order(source, words or self.max_words or 2 * len(source) + 10, until)


@compiled
def traced_back(choices: NDArray[np.int64], last: int, num_words: int) -> NDArray[np.int64]:
    """Return the words of a hypothesis, [steps]. choices: [steps, beam], see BeamStep. last: its place at the end."""
    words, place = np.empty(len(choices), np.int64), last
    for step in range(len(choices) - 1, -1, -1):
        choice = choices[step, place]
        words[step] = choice % num_words
        place = choice // num_words
    return words
