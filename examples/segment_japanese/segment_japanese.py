"""Where the words of a Japanese sentence begin and end: the network of nagisa 0.3.

An LSTM in each direction over characters, each with its neighbours and the dictionary's words that begin and end there;
then the path of tags (a word's first character, middle, last, or a word by itself) that is the best as a whole.
"""

from __future__ import annotations

from typing import Any

import nagisa
import nagisa_utils
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.server import Signature, TensorSpec

MOST_WORDS = 8
"""Of the dictionary's words that begin, or end, at one character: they have 1 to 8 characters."""


class Look(nn.Module):
    """What is known of a character, a row of numbers -> a vector.

    A row has the characters, pairs and kinds of a window around it, then the words that begin there and those that end.
    """

    def __init__(self, network: Any, window: int) -> None:
        super().__init__()
        self.characters, self.pairs, self.kinds = map(embedding_of, (network.UNI, network.BI, network.CTYPE))
        none = np.zeros((1, network.WORD.shape[1]), np.float32)  # where there are fewer words than there is room for
        self.words = embedding_of(np.concatenate((network.WORD, none)))
        self.widths = [window] * 3 + [MOST_WORDS] * 2

    def forward(self, row: Tensor) -> Tensor:
        characters, pairs, kinds, begin, end = row.split(self.widths, 1)
        around = [self.characters(characters), self.pairs(pairs), self.kinds(kinds)]
        return torch.cat([*(x.flatten(1) for x in around), self.words(begin).sum(1), self.words(end).sum(1)], 1)


class Scores(nn.Module):
    """The states of both directions at a character -> a score for each tag."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        weight, bias = tensor_of(network.w_wsT.T), tensor_of(network.b_ws)
        self.out = nn.Linear(*weight.shape[::-1])
        self.out.load_state_dict({"weight": weight, "bias": bias})

    def forward(self, forwards: Tensor, backwards: Tensor) -> Tensor:
        return self.out(torch.cat((forwards, backwards), 1))


class SegmentJapanese(bm.Model):
    """A request is what `encode` knows of each character, int64 [n, window * 3 + 16]; the result scores [n, 6]."""

    def __init__(self, tagger: Any) -> None:
        network = tagger._model
        self.look = bm.Cell(Look(network, tagger._hp["WINDOW_SIZE"]), max_batch=256)
        self.lstm = bm.recurrent(lstm_of(network.ws_model), join=False, max_batch=256)
        self.scores = bm.Cell(Scores(network), max_batch=256, priority=1)
        self.tagger = tagger
        self.example_request = self.encode("文を単語に分ける")

    def unfold(self, characters: Any) -> Any:
        (forwards, backwards), _ = self.lstm(self.look.map(characters))
        return self.scores.map(forwards, backwards)

    def encode(self, sentence: str) -> NDArray[np.int64]:
        """Return what is known of each character of a sentence."""
        tagger = self.tagger
        known = nagisa_utils.feature_extraction(
            nagisa_utils.preprocess(sentence).lower(),
            tagger._uni2id,
            tagger._bi2id,
            tagger._word2id,
            tagger._hp["WINDOW_SIZE"],
        )
        none = len(tagger._model.WORD)
        rows = [
            [*characters, *pairs, *kinds, *padded(begin, none), *padded(end, none)]
            for characters, pairs, kinds, begin, end in zip(*known, strict=True)
        ]
        return np.array(rows, np.int64)

    def decode(self, scores: Tensor, sentence: str) -> list[str]:
        """Return the words of a sentence: those of the best path of tags."""
        tags = nagisa_utils.np_viterbi(self.tagger._model.trans_array, scores.numpy())
        return nagisa_utils.segmenter_for_bmes(nagisa_utils.preprocess(sentence), tags)

    def serving_signature(self) -> Signature:
        """A client sends a sentence and gets its words."""
        sentence, words = TensorSpec("sentence", "BYTES", (1,)), TensorSpec("words", "BYTES", (-1,))
        return Signature((sentence,), (words,), request="value", encode=self.encode, decode=self.decode)


def build() -> SegmentJapanese:
    """Return the model with the weights and the dictionary of the nagisa that is installed."""
    return SegmentJapanese(nagisa.Tagger())


def padded(words: list[int], none: int) -> list[int]:
    return words + [none] * (MOST_WORDS - len(words))


def tensor_of(array: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, np.float32))


def embedding_of(table: Any) -> nn.Embedding:
    return nn.Embedding.from_pretrained(tensor_of(table))


def lstm_of(layers: Any) -> nn.LSTM:
    """Return nagisa's layer in both directions as torch has it: gates i, f, g, o in place of i, f, o, g, one bias."""
    ((forwards, backwards),) = layers.layers
    lstm = nn.LSTM(forwards.WxT.shape[0], forwards.h_dim, bidirectional=True)
    weights = {}
    for suffix, one in (("", forwards), ("_reverse", backwards)):
        for name, array in (("weight_ih", one.WxT.T), ("weight_hh", one.WhT.T), ("bias_ih", one.b)):
            i, f, o, g = tensor_of(array).chunk(4)
            weights[f"{name}_l0{suffix}"] = torch.cat((i, f, g, o))
        weights[f"bias_hh_l0{suffix}"] = torch.zeros(4 * one.h_dim)
    lstm.load_state_dict(weights)
    return lstm.eval()
