import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmaker.errors import DataError, OptionError
from batchmaker.lab.datasets import BOS_ID, EOS_ID, NUM_RESERVED, RESERVED_WORDS, UNK_ID, Vocabulary

# Any word but the reserved ones, which all hold a "<".
WORDS = st.text(
    st.characters(codec="utf-8", exclude_categories=("Z", "C"), exclude_characters="<"),
    min_size=1,
    max_size=6,
)
SENTENCES = st.lists(st.lists(WORDS, min_size=1), min_size=1)


@pytest.fixture
def vocabulary():
    return Vocabulary.from_lines(["b a b", "c a b"])


def test_reserved_words_come_first_then_the_most_frequent(vocabulary):
    assert vocabulary.words == ("<unk>", "<s>", "</s>", "b", "a", "c")
    assert len(vocabulary) == 6
    assert [vocabulary.id_of(word) for word in RESERVED_WORDS] == [UNK_ID, BOS_ID, EOS_ID]


def test_ties_go_to_the_word_seen_first():
    assert Vocabulary.from_lines(["z y", "x z y x"]).words[NUM_RESERVED:] == ("z", "y", "x")


def test_max_size_counts_the_reserved_words():
    vocabulary = Vocabulary.from_lines(["b a b", "c a b"], max_size=5)
    assert vocabulary.words[NUM_RESERVED:] == ("b", "a")
    assert vocabulary.encode("c b").tolist() == [UNK_ID, 3]


@pytest.mark.parametrize("max_size", [-1, 0, NUM_RESERVED])
def test_a_max_size_without_room_for_a_word_is_refused(max_size):
    with pytest.raises(OptionError, match=f"max_size: got {max_size}, expected at least 4"):
        Vocabulary.from_lines(["a"], max_size)


def test_a_line_is_encoded_as_int64(vocabulary):
    ids = vocabulary.encode("  c b new ")
    assert ids.dtype == np.int64
    assert ids.tolist() == [5, 3, UNK_ID]


def test_a_blank_line_has_no_ids(vocabulary):
    ids = vocabulary.encode(" ")
    assert (ids.shape, ids.dtype) == ((0,), np.int64)
    assert vocabulary.decode(ids) == ""


def test_reserved_words_in_a_text_keep_their_ids():
    vocabulary = Vocabulary.from_lines(["<s> a <unk> <unk> </s> <eos> <eos>"])
    assert vocabulary.words == (*RESERVED_WORDS, "a")
    assert vocabulary.encode("<s> a <eos> </s>").tolist() == [BOS_ID, 3, EOS_ID, EOS_ID]


def test_decoding_leaves_the_sentence_marks_out(vocabulary):
    assert vocabulary.decode([BOS_ID, 3, UNK_ID, 4, EOS_ID]) == "b <unk> a"


def test_membership_knows_reserved_words_and_the_alias(vocabulary):
    assert "a" in vocabulary
    assert "<eos>" in vocabulary
    assert "new" not in vocabulary


@given(SENTENCES)
def test_known_words_come_back_from_their_ids(sentences):
    vocabulary = Vocabulary.from_sentences(sentences)
    for sentence in sentences:
        assert vocabulary.decode(vocabulary.encode_words(sentence)).split() == sentence
        assert (vocabulary.encode(" ".join(sentence)) == vocabulary.encode_words(sentence)).all()


@given(SENTENCES)
def test_no_word_left_out_is_more_frequent_than_one_kept(sentences):
    counts = Counter(word for sentence in sentences for word in sentence)
    kept = Vocabulary.from_sentences(sentences, max_size=6).words[NUM_RESERVED:]
    assert len(kept) == min(3, len(counts))
    assert [counts[word] for word in kept] == sorted(counts.values(), reverse=True)[: len(kept)]


@given(SENTENCES)
def test_a_saved_vocabulary_loads_as_it_was(tmp_path_factory, sentences):
    vocabulary = Vocabulary.from_sentences(sentences)
    path = tmp_path_factory.mktemp("vocabulary") / "words.txt"
    vocabulary.save(path)
    assert Vocabulary.load(path) == vocabulary


def test_the_saved_file_has_one_word_a_line(vocabulary, tmp_path):
    vocabulary.save(tmp_path / "words.txt")
    assert (tmp_path / "words.txt").read_bytes() == b"<unk>\n<s>\n</s>\nb\na\nc\n"


def test_a_no_break_space_inside_a_tree_word_survives_saving(tmp_path):
    vocabulary = Vocabulary.from_sentences([["8\u00a01/2"]])
    vocabulary.save(tmp_path / "words.txt")
    assert Vocabulary.load(tmp_path / "words.txt").encode_words(["8\u00a01/2"]).tolist() == [3]


def test_a_vocabulary_can_be_pickled(vocabulary):
    assert pickle.loads(pickle.dumps(vocabulary)).encode("a").tolist() == [4]


def test_several_files_are_counted_together(write):
    paths = [write("a b\n", "x.txt"), write("b\n", "y.txt")]
    assert Vocabulary.from_files(paths).words[NUM_RESERVED:] == ("b", "a")


@pytest.mark.parametrize("content", ["", " \n\n"])
def test_a_file_without_words_is_named(write, content):
    with pytest.raises(DataError, match=r"data\.txt: the file has no words"):
        Vocabulary.from_files([write(content)])


def test_a_text_without_words_is_refused():
    with pytest.raises(DataError, match="at least one word"):
        Vocabulary.from_lines([" "])


def test_a_line_given_as_a_sentence_is_refused():
    with pytest.raises(OptionError, match="Use from_lines"):
        Vocabulary.from_sentences(["to be"])


def test_a_missing_vocabulary_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"absent\.txt: there is no such file"):
        Vocabulary.load(tmp_path / "absent.txt")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "starts with <unk>"),
        ("the\nof\n", "starts with <unk>"),
        ("<unk>\n<s>\n</s>\na\nb\na\n", "word 6: 'a' is already word 4"),
        ("<unk>\n<s>\n</s>\n<eos>\n", "word 4: '<eos>' is already word 3"),
        ("<unk>\n<s>\n</s>\na\n\nb\n", "word 5: '' is empty"),
        ("<unk>\n<s>\n</s>\na 12\n", "word 4: 'a 12' is empty or holds whitespace"),
    ],
)
def test_a_malformed_vocabulary_file_is_explained(write, content, complaint):
    with pytest.raises(DataError, match=complaint) as caught:
        Vocabulary.load(write(content))
    assert "data.txt" in str(caught.value)


def test_a_place_that_cannot_be_written_is_named(vocabulary, tmp_path):
    with pytest.raises(DataError, match="cannot be written"):
        vocabulary.save(tmp_path / "no" / "folder.txt")


@pytest.mark.parametrize(("ids", "complaint"), [([3, 6], "got id 6"), ([-1], "got id -1")])
def test_an_id_outside_the_vocabulary_is_refused(vocabulary, ids, complaint):
    with pytest.raises(DataError, match=f"{complaint}, expected 0 <= id < 6"):
        vocabulary.decode(ids)


@pytest.mark.parametrize("ids", [[[3]], [0.5], 3])
def test_what_is_no_list_of_ids_is_refused(vocabulary, ids):
    with pytest.raises(DataError, match="one-dimensional integers"):
        vocabulary.decode(ids)


def test_a_published_vocabulary_file_is_read(real_data):
    vocabulary = Vocabulary.load(real_data("iwslt15_envi/vocab.en"))
    assert len(vocabulary) == 17_191
