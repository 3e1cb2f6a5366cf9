"""Lattices: what they may be, files of them, and those of sentences and word lists."""

import gzip

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmaker.errors import DataError, OptionError
from batchmaker.lab.datasets import (
    Lattice,
    Vocabulary,
    WordList,
    lattice_of,
    random_lattices,
    read_lattices,
    read_word_list,
)

FILE = "2\n3\n0 7 9\n0 \n1 0 62\n2 1 48 0 33\n\n1\n4\n0\n"


def lattice(arcs, num_nodes=4, dtype=np.int64):
    return Lattice(np.array(arcs, dtype=dtype).reshape(-1, 3), np.zeros(num_nodes, np.int64))


def written(lattices):
    """The lattices as a file has them."""
    parts = [str(len(lattices))]
    for one in lattices:
        parts += [str(one.num_nodes), " ".join(map(str, one.labels.tolist()))]
        for node in range(one.num_nodes):
            arcs = one.arcs[one.arcs[:, 1] == node]
            parts.append(" ".join([str(len(arcs)), *(f"{source} {token}" for source, _, token in arcs.tolist())]))
    return "\n".join(parts) + "\n"


def test_a_file_has_labels_and_then_the_arcs_to_each_node(write):
    first, second = read_lattices(write(FILE))
    assert first.arcs.tolist() == [[0, 1, 62], [1, 2, 48], [0, 2, 33]]
    assert first.are_characters.tolist() == [True, True, False]
    assert first.labels.tolist() == [0, 7, 9]
    assert (second.arcs.shape, second.labels.tolist(), second.num_nodes) == ((0, 3), [4], 1)


@given(st.integers(1, 4), st.integers(0, 999))
def test_lattices_come_back_from_their_file(tmp_path_factory, count, seed):
    lattices = random_lattices(count, seed, 1, 8)
    path = tmp_path_factory.mktemp("lattices") / "lattices.txt"
    path.write_text(written(lattices))
    assert read_lattices(path) == lattices


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", r"data\.txt: the file ends after line 0; expected the number of lattices"),
        ("0\n", r"line 1: got '0', expected the number of lattices, a whole number of at least 1"),
        ("1\nx", r"line 2: got 'x', expected lattice 1 of 1: its number of nodes"),
        ("1\n0", r"line 2: got '0', expected lattice 1 of 1: its number of nodes"),
        ("1\n2\n0", r"ends after line 3; expected lattice 1 of 1: the label of node 1"),
        ("1\n2\n0 -1", r"line 3: got '-1', expected lattice 1 of 1: the label of node 1"),
        ("1\n2\n0 0\n0\n1 1 5", r"line 5: got '1', .*where an arc to node 1 comes from, a whole number from 0 to 0"),
        ("1\n1\n0\n1 0 5", r"line 4: got '0', .*where an arc to node 0 comes from"),
        ("1\n2\n0 0\n0\n2 0 5", r"ends after line 5; .*where an arc to node 1 comes from"),
        ("1\n2\n0 0\n0\n1 0", r"ends after line 5; .*the id of an arc to node 1"),
        ("1\n1\n0\n0\n\n7", r"line 6: got '7' after 1 lattices; expected the end"),
        ("9" * 30, r"line 1: got '9{30}', expected the number of lattices"),
    ],
)
def test_a_malformed_file_is_explained(write, content, complaint):
    with pytest.raises(DataError, match=complaint):
        read_lattices(write(content))


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: lattice([[1, 1, 0]]), "no cycle"),
        (lambda: lattice([[2, 1, 0]]), "no cycle"),
        (lambda: lattice([[-1, 1, 0]]), "0 <= source"),
        (lambda: lattice([[0, 4, 0]]), "target < 4"),
        (lambda: lattice([[0, 2, 0], [0, 1, 0]]), "order of their targets"),
        (lambda: lattice([[0, 1, 0]], dtype=np.int32), "got int32"),
        (lambda: lattice([], num_nodes=0), "labels"),
    ],
)
def test_arcs_that_make_no_lattice_are_refused(make, complaint):
    with pytest.raises(DataError, match=complaint):
        make()


def test_a_sentence_has_every_word_of_the_list_that_stands_in_it():
    words = WordList(("你好", "好", "好世界", "世界", "界你"))
    characters = Vocabulary.from_sentences([list("你好世界")])
    found = lattice_of("你好世界", words, characters, np.array([5, 6, 7, 8]))
    ids = characters.encode_words(list("你好世界")).tolist()
    assert found.arcs.tolist() == [
        [0, 1, ids[0]], [1, 2, ids[1]], [0, 2, 0], [2, 3, ids[2]], [3, 4, ids[3]], [1, 4, 2], [2, 4, 3],
    ]  # fmt: skip
    assert found.labels.tolist() == [0, 5, 6, 7, 8]
    assert lattice_of("x", words, characters).arcs.tolist() == [[0, 1, 0]]  # unknown
    with pytest.raises(DataError, match="at least one character"):
        lattice_of("", words, characters)


@given(st.text("ab", min_size=1, max_size=12), st.sets(st.text("ab", min_size=1, max_size=4), max_size=12))
def test_the_words_of_a_lattice_are_exactly_the_substrings_in_the_list(sentence, words):
    known = WordList(tuple(sorted(words)))
    arcs = lattice_of(sentence, known, Vocabulary.from_sentences([["a", "b"]])).arcs
    found = {(source, target, known.words[token]) for source, target, token in arcs.tolist() if target - source > 1}
    places = [(i, j) for j in range(len(sentence) + 1) for i in range(j - 1)]
    assert found == {(i, j, sentence[i:j]) for i, j in places if sentence[i:j] in words}


def test_a_word_list_has_a_word_a_line_with_or_without_its_frequency(tmp_path, write):
    assert read_word_list(write("你好\t12\n\n世界\n")).words == ("你好", "世界")
    (tmp_path / "words.tsv.gz").write_bytes(gzip.compress("一一\t1670\n".encode()))
    words = read_word_list(tmp_path / "words.tsv.gz")
    assert (len(words), words.longest, words.id_of("一一"), words.id_of("一")) == (1, 2, 0, None)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", r"data\.txt: the file has no words"),
        ("a\t1\nb\tx\n", r"line 2: got 'b\\tx', expected a word"),
        ("\t3\n", r"line 1: got '\\t3'"),
        ("a\t1\nb\na\t2\n", r"line 3: 'a' is already on line 1"),
    ],
)
def test_a_malformed_word_list_is_explained(write, content, complaint):
    with pytest.raises(DataError, match=complaint):
        read_word_list(write(content))


def test_a_word_list_has_no_word_twice():
    with pytest.raises(DataError, match="distinct"):
        WordList(("a", "a"))


def test_generated_lattices_are_seeded_and_have_half_a_word_for_each_character():
    lattices = random_lattices(200, 3)
    assert lattices == random_lattices(200, 3)
    assert lattices != random_lattices(200, 4)
    assert {min(len(one.labels) for one in lattices), max(len(one.labels) for one in lattices)} <= set(range(11, 62))
    words = sum(int((~one.are_characters).sum()) for one in lattices)
    assert words / sum(one.num_nodes - 1 for one in lattices) == pytest.approx(0.5, abs=0.05)
    for one in lattices:  # each place has its character, and it is first
        first = np.unique(one.arcs[:, 1], return_index=True)[1]
        assert one.are_characters[first].all()
        assert len(first) == one.num_nodes - 1
    with pytest.raises(OptionError, match="max_characters"):
        random_lattices(1, 0, 5, 4)


def test_the_lattices_of_ed_batch_are_read_whole(real_data):
    lattices = read_lattices(real_data("lattice_edbatch/train.txt"))
    assert len(lattices) == 1147
    assert np.mean([one.num_nodes for one in lattices]) == pytest.approx(44.1, abs=0.05)
    assert all(one.arcs[0].tolist()[:2] == [0, 1] for one in lattices)  # nothing leads to the start
    assert max(int(np.bincount(one.arcs[:, 1]).max()) for one in lattices) == 5
