"""Trees in brackets, as in the Stanford Sentiment Treebank (Socher et al., EMNLP 2013).

A leaf is `(label word)`, an internal node `(label left right)`, labels are integers, one tree a line:
`(3 (2 Rock) (4 (3 on) (2 .)))`. Escapes such as `-LRB-` for a bracket are plain words.
"""

from __future__ import annotations

import re
from os import PathLike

import numpy as np

from batchmaker.errors import DataError
from batchmaker.lab.datasets.text import read_lines
from batchmaker.lab.datasets.trees import Tree

_BLANKS = r"[ \t\r\n]*"
_WORD = re.compile(r"[^ \t\r\n()]+")  # not \s: the treebank has words such as "8<no-break space>1/2"
_LABEL = r"(-?[0-9]{1,18})"
_TOKEN = re.compile(
    rf"\({_BLANKS}{_LABEL}[ \t\r\n]+({_WORD.pattern}){_BLANKS}\)"  # 1, 2: a leaf
    rf"|\({_BLANKS}{_LABEL}(?=[ \t\r\n]*\()"  # 3: an internal node opens
    r"|(\))"  # 4: it closes
    r"|([^ \t\r\n])"  # 5: anything else is wrong
)
_NODE_START = re.compile(rf"\({_BLANKS}([^ \t\r\n()]*){_BLANKS}(.)")
_LEAF, _OPEN, _CLOSE = 2, 3, 4


def read_trees(path: str | PathLike[str]) -> list[Tree]:
    """Return the trees of a file, one a line; blank lines are skipped. Gzipped if named `.gz`.

    Raises DataError, naming file, line and column, for a malformed tree, and if there is no tree at all.
    """
    trees: list[Tree] = []
    for line_number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        try:
            trees.append(parse_tree(line))
        except DataError as error:
            raise DataError(f"{path}, line {line_number}, {error}") from error
    if not trees:
        raise DataError(f"{path}: the file has no trees; expected one tree in brackets a line.")
    return trees


def parse_tree(text: str) -> Tree:
    """Return the tree that the text spells; internal nodes come out in postorder.

    Not recursive, so depth is limited by memory alone. Escapes such as `-LRB-` are plain words.
    Raises DataError, naming the column (from 1), if the text is empty, not balanced, not binary, has a node
    without a label (an integer of at most 18 digits), or goes on after the tree.
    """
    words: list[str] = []
    leaf_labels: list[int] = []
    internal_labels: list[int] = []
    children: list[tuple[int, int]] = []
    done: list[int] = []  # roots without a parent yet; internal node j is ~j until the leaves are counted
    opened: list[tuple[int, int, int]] = []  # label, len(done) and offset at each open bracket
    for token in _TOKEN.finditer(text):
        kind = token.lastindex
        if done and not opened and kind != _CLOSE:
            raise _malformed(token.start(), "text after the end of the tree; expected one tree")
        if kind == _LEAF:
            done.append(len(words))
            words.append(token[2])
            leaf_labels.append(int(token[1]))
        elif kind == _OPEN:
            opened.append((int(token[3]), len(done), token.start()))
        elif kind == _CLOSE and opened:
            label, base, start = opened.pop()
            if len(done) != base + 2:
                raise _malformed(start, f"a node with {len(done) - base} children; expected two (not binary)")
            children.append((done[base], done[base + 1]))
            done[base:] = [~len(internal_labels)]
            internal_labels.append(label)
        else:
            raise _malformed(token.start(), _what_is_wrong(text[token.start() :]))
    if opened:
        raise _malformed(opened[-1][2], "a bracket that is never closed (unbalanced)")
    if not done:
        raise _malformed(0, "nothing (empty); expected a tree such as (2 word) or (3 (2 a) (1 b))")
    pairs = np.array(children, dtype=np.int32).reshape(-1, 2)
    return Tree(
        words=tuple(words),
        children=np.where(pairs < 0, len(words) + ~pairs, pairs).astype(np.int32, copy=False),
        labels=np.array(leaf_labels + internal_labels, dtype=np.int64),
    )


def to_sexpr(tree: Tree) -> str:
    """Return the tree in brackets on one line; `parse_tree` reads it, internal nodes in postorder.

    Raises DataError for a word that is empty or contains a bracket or a blank: write `-LRB-`, `-RRB-`.
    """
    for word in tree.words:
        if not _WORD.fullmatch(word):
            raise DataError(f"tree, word {word!r}: a word in brackets holds no bracket or blank.")
    children, labels = tree.children.tolist(), tree.labels.tolist()
    parts: list[str] = []
    todo: list[int | None] = [tree.num_nodes - 1]  # None closes a bracket
    while todo:
        node = todo.pop()
        if node is None:
            parts.append(")")
        elif node < tree.num_leaves:
            parts.append(f" ({labels[node]} {tree.words[node]})")
        else:
            parts.append(f" ({labels[node]}")
            left, right = children[node - tree.num_leaves]
            todo += (None, right, left)
    return "".join(parts)[1:]


def _malformed(offset: int, what: str) -> DataError:
    return DataError(f"column {offset + 1}: got {what}.")


def _what_is_wrong(rest: str) -> str:
    """Describe text that is neither a leaf nor an opening or closing bracket."""
    if rest[0] == ")":
        return "a closing bracket that was never opened (unbalanced)"
    if rest[0] != "(":
        word = rest[: _WORD.match(rest).end()]  # type: ignore[union-attr]  # no bracket, no blank: a word
        return f"the bare word {word!r}; expected a node in brackets"
    if ")" not in rest:
        return "a bracket that is never closed (unbalanced)"
    label, after = _NODE_START.match(rest).groups()  # type: ignore[union-attr]  # matches any "("
    if not label:
        return "a node without a label (missing label, or empty)"
    if not re.fullmatch(_LABEL, label):
        return f"the label {label!r}, not an integer of at most 18 digits (missing label)"
    if after == ")":
        return f"a node with only a label, {label} (empty, or missing label); expected a word or two nodes"
    return f"a node with label {label} that is neither (label word) nor (label node node)"
