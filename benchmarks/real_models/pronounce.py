"""g2p_en: words to sounds."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any
from unittest import mock

from engine_cost.hand_decoders import FoldedBatch, PlainBatch
from real_models.case import Case, Data, example, text


def case(data: Data) -> Case:
    """English words in the order of a text, each once; GRU 256, about 7 letters in and 7 sounds out."""
    model: Any = example("pronounce", "g2p_en")
    words = re.findall(r"[a-z]+", text(data, "europarl_deen", "raw5k.en").lower())
    words = [word for word in dict.fromkeys(words) if len(word) > 2][: data.of(3000, 60)]
    reader, writer = model.read.module, model.write.module
    return Case(
        package="g2p_en",
        about="English words, GRU 256, stops at a value",
        asked=words,
        model=model,
        by_hand={"torch": PlainBatch(reader, writer), "compiled": FoldedBatch(reader, writer)},
        own=package().predict,
        same=lambda ours, theirs: ours == theirs,
        target=1.0,
        encode=model.encode,
        decode=model.decode,
    )


def package() -> Any:
    """Return g2p_en's G2p without its dictionary, which would have to be downloaded; `predict` does not use it."""
    import nltk

    with mock.patch.object(nltk, "download", return_value=False):
        from g2p_en import g2p
    with mock.patch.object(g2p, "cmudict", SimpleNamespace(dict=dict)):
        return g2p.G2p()
