"""Tagged sentences: lines of word|TAG, columns, and generated ones."""

import numpy as np
import pytest

from batchmaker.errors import DataError, OptionError
from batchmaker.lab.datasets import (
    TaggedSentence,
    Vocabulary,
    lattice_of,
    random_tagged_sentences,
    read_columns,
    read_numbered_characters,
    read_tagged,
    read_word_list,
)


def test_the_last_bar_is_before_the_tag(write):
    assert read_tagged(write("The|O Oxford|I-MISC\n\n|||O a|b|X\n")) == [
        TaggedSentence(("The", "Oxford"), ("O", "I-MISC")),
        TaggedSentence(("||", "a|b"), ("O", "X")),
    ]


@pytest.mark.parametrize("line", ["plain", "word|", "|O"])
def test_the_line_of_a_word_without_a_tag_is_named(write, line):
    with pytest.raises(DataError, match=r"data\.txt, line 2: got '.*', expected word\|TAG"):
        read_tagged(write(f"a|O\nb|O {line}\n"))


def test_columns_end_a_sentence_at_a_blank_line(write):
    expected = [TaggedSentence(("a", "b"), ("O", "X")), TaggedSentence(("c",), ("O",))]
    assert read_columns(write("\na\tO\nb\tX\n\n \nc\tO\n")) == expected


def test_the_digit_behind_a_character_is_dropped(write):
    assert read_numbered_characters(write("科0\tO\n技1\tB\n\n50\tO\n")) == [
        TaggedSentence(("科", "技"), ("O", "B")),
        TaggedSentence(("5",), ("O",)),
    ]


@pytest.mark.parametrize("line", ["科", "科\tO", "0\tO", "科0\t", "科0\tO\tX"])
def test_the_line_that_has_no_numbered_character_is_named(write, line):
    with pytest.raises(DataError, match=r"data\.txt, line 3: got .*expected a character, a digit, a tab and its tag"):
        read_numbered_characters(write(f"科0\tO\n\n{line}\n"))


@pytest.mark.parametrize("read", [read_tagged, read_columns, read_numbered_characters])
@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_sentences_is_refused(write, read, content):
    with pytest.raises(DataError, match=r"data\.txt: the file has no sentences"):
        read(write(content))


def test_words_and_tags_are_as_many():
    with pytest.raises(DataError, match="2 words and 1 tags"):
        TaggedSentence(("a", "b"), ("O",))


def test_generated_sentences_are_seeded():
    sentences = random_tagged_sentences([3, 5, 1], 7, vocabulary=4, tags="AB")
    assert sentences == random_tagged_sentences([3, 5, 1], 7, vocabulary=4, tags="AB")
    assert [len(sentence.words) for sentence in sentences] == [3, 5, 1]
    assert {word for sentence in sentences for word in sentence.words} <= {"w1", "w2", "w3", "w4"}
    assert {tag for sentence in sentences for tag in sentence.tags} <= {"A", "B"}
    with pytest.raises(OptionError, match="tags"):
        random_tagged_sentences([1], 0, tags=())


def test_wikiner_is_read_whole(real_data):
    sentences = read_tagged(real_data("wikiner_en/train.txt"))
    assert len(sentences) == 10_000
    assert np.mean([len(sentence.words) for sentence in sentences]) == pytest.approx(24.8, abs=0.05)
    assert len({tag for sentence in sentences for tag in sentence.tags}) == 9


def test_weibo_sentences_have_the_words_that_their_description_counts(real_data):
    sentences = read_numbered_characters(real_data("weibo_ner/weiboNER_2nd_conll.dev"))
    assert len(sentences) == 270
    words = read_word_list(real_data("zh_words/jieba_words.tsv.gz"))
    characters = Vocabulary.from_sentences(sentence.words for sentence in sentences)
    lattices = [lattice_of(sentence.words, words, characters) for sentence in sentences]
    assert np.mean([len(sentence.words) for sentence in sentences]) == pytest.approx(53.7, abs=0.05)
    assert np.mean([(~lattice.are_characters).sum() for lattice in lattices]) == pytest.approx(16.4, abs=0.05)
