"""examples/segment_japanese finds the words that nagisa finds."""

from __future__ import annotations

import numpy as np
import pytest
from example_models import answers, example

import batchmaker as bm

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

BEGINNINGS = ["今日は", "東京都の", "Pythonで", "彼女が", "100円の", "コンピューターと"]
MIDDLES = ["とても早く", "新しい辞書を", "ｶﾀｶﾅの名前に", "", "🍣や寿司も"]
ENDS = ["見つけました。", "読んでいる人がいる", "使えますか？", "ABC-123"]
SENTENCES = [begin + middle + end for begin in BEGINNINGS for middle in MIDDLES for end in ENDS] + ["あ", "天気"]


@pytest.fixture(scope="module")
def model():
    return example("segment_japanese", "nagisa")


def test_every_sentence_has_the_packages_words(model):
    import nagisa

    assert len(SENTENCES) >= 50
    assert answers(model, SENTENCES) == [nagisa.wakati(sentence) for sentence in SENTENCES]


def test_scores_of_tags_are_the_packages(model):
    import nagisa
    import nagisa_utils

    tagger = nagisa.tagger
    with bm.Engine(model, threads=1) as engine:
        found = engine.map([model.encode(sentence) for sentence in SENTENCES], progress=False)
    for sentence, scores in zip(SENTENCES, found, strict=True):
        known = nagisa_utils.feature_extraction(
            nagisa_utils.preprocess(sentence).lower(), tagger._uni2id, tagger._bi2id, tagger._word2id, 3
        )
        assert np.abs(scores.numpy() - np.stack(tagger._model.encode_ws(known))).max() < 1e-4
