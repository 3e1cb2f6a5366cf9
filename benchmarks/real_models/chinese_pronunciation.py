"""g2pM: Chinese sentences to pinyin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from engine_cost.hand_tagger import FoldedStates, PlainStates, States
from real_models.case import Case, Data, example, text


def case(data: Data) -> Case:
    """Sentences of Weibo; a BiLSTM of 32 in each direction over characters, and two layers where a reading is open."""
    model: Any = example("chinese_pronunciation", "g2pM")
    from g2pM import G2pM

    package = G2pM()
    step, back = model.lstm.l0.module, model.lstm.l0_reverse.module
    directions = ((step.embedding, step.cell), (back.embedding, back.cell))
    states: dict[str, States] = {
        "padded": PlainStates(directions, packed=False),
        "packed": PlainStates(directions, packed=True),
        "compiled": FoldedStates(directions),
    }
    return Case(
        package="g2pM",
        about="Chinese sentences, BiLSTM 32 + 32, two layers where a character has several readings",
        asked=sentences(data)[: data.of(1350, 40)],
        model=model,
        by_hand={name: Readings(run, model.reading.module) for name, run in states.items()},
        own=lambda sentence: package(sentence, tone=True, char_split=True),
        same=lambda ours, theirs: ours == theirs,
        target=0.8,
        encode=model.encode,
        decode=model.decode,
        length=lambda request: len(request["characters"]),
    )


def sentences(data: Data) -> list[str]:
    """Return Weibo's sentences. Each line of the file is a character, its place in a word, and a tag."""
    whole = text(data, "weibo_ner", "weiboNER_2nd_conll.train")
    blocks = whole.strip().split("\n\n")
    return ["".join(line.split("\t")[0][:-1] for line in block.splitlines()) for block in blocks]


@final
class Readings:
    """A batch of sentences by these states; the output over all open places of the batch together."""

    def __init__(self, states: States, reading: nn.Module) -> None:
        self._states, self._reading = states, reading

    @torch.no_grad()
    def __call__(self, requests: Sequence[dict[str, Any]]) -> list[Tensor]:
        """Return the readings at the open places of each sentence."""
        counts = [len(request["places"]) for request in requests]
        open_ones = [request for request in requests if len(request["places"])]
        if not open_ones:
            return [torch.empty(0, dtype=torch.int64)] * len(requests)
        ends = np.cumsum([len(request["characters"]) for request in open_ones])
        starts = np.concatenate(([0], ends[:-1]))
        places = np.concatenate([start + request["places"] for start, request in zip(starts, open_ones, strict=True)])
        forwards, backwards = self._states([request["characters"] for request in open_ones])
        chosen = torch.from_numpy(places)
        return list(self._reading(forwards[chosen], backwards[chosen]).split(counts))
