import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmaker.errors import DataError
from batchmaker.lab.datasets import SentencePair, read_aligned, read_lines, tokenize


def test_lines_come_without_their_ends_and_blank_ones_stay(write):
    assert read_lines(write("a b\n\nc\r\n d ")) == ["a b", "", "c", " d "]


def test_an_empty_file_has_no_lines(write):
    assert read_lines(write("")) == []


def test_only_line_feeds_end_a_line(write):
    assert read_lines(write("a\u2028b\x85c\x0cd\ne\n")) == ["a\u2028b\x85c\x0cd", "e"]


def test_a_byte_order_mark_is_dropped(write):
    assert read_lines(write(b"\xef\xbb\xbfhello\n")) == ["hello"]


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n\ufeff"))))
def test_gzipped_lines_read_as_they_were_written(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("text") / "lines.txt.gz"
    path.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode()))
    assert read_lines(path) == lines


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"absent\.txt: there is no such file"):
        read_lines(tmp_path / "absent.txt")


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_lines(tmp_path)


def test_the_line_that_is_not_utf8_is_named(write):
    with pytest.raises(DataError, match=r"data\.txt, line 3: .*0xff"):
        read_lines(write(b"a\nb\nc\xff\n"))


@pytest.mark.parametrize("content", [b"plain text", gzip.compress(b"a\nb\n" * 99)[:-9]], ids=["plain", "cut short"])
def test_a_broken_gzip_file_is_refused(write, content):
    with pytest.raises(DataError, match="not a whole gzip file"):
        read_lines(write(content, "lines.gz"))


def test_tokens_are_separated_by_any_whitespace():
    assert tokenize("  to be\t or\u00a0not ") == ("to", "be", "or", "not")


def test_aligned_lines_become_pairs_and_blank_sides_are_counted(write):
    text = read_aligned(write("a b\n\nc\nd\n", "x.en"), write("A\nB\n \nD E\n", "x.de"))
    assert text.pairs == (SentencePair("a b", "A", 1), SentencePair("d", "D E", 4))
    assert text.num_skipped == 2
    assert len(text) == 2
    assert text.pairs[1].source_tokens == ("d",)
    assert text.pairs[1].target_tokens == ("D", "E")


def test_different_line_counts_are_both_named(write):
    with pytest.raises(DataError, match=r"x\.en has 2, .*x\.de has 3"):
        read_aligned(write("a\nb\n", "x.en"), write("A\nB\nC\n", "x.de"))


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_files_without_a_pair_are_refused(write, content):
    with pytest.raises(DataError, match="at least one pair"):
        read_aligned(write(content, "x.en"), write(content, "x.de"))


def test_europarl_has_28_pairs_with_a_blank_side(real_data):
    text = read_aligned(real_data("europarl_deen/raw5k.de"), real_data("europarl_deen/raw5k.en"))
    assert (len(text), text.num_skipped) == (4972, 28)
    assert max(len(pair.target_tokens) for pair in text.pairs) == 130


def test_gzipped_europarl_is_read(real_data):
    text = read_aligned(real_data("europarl_fren/tok20k.en.gz"), real_data("europarl_fren/tok20k.fr.gz"))
    assert (len(text), text.num_skipped) == (19_965, 35)
