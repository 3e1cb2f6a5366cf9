"""The grammar of sizes in a saved graph: sums, products and the like of symbols and numbers, all of it small.

sympy evaluates such a text as Python, and while it builds it: `Pow(9, Pow(9, 9))` would be a number of 370 million
digits. So before sympy gets a text, it is parsed here, and the largest number and the most terms that it could become
are bounded.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any, Final, final

MAX_LETTERS: Final = 2000
MAX_TERMS: Final = 64
"""Calls and numbers in one size."""

_MAX_DEPTH: Final = 32
_MAX_BITS: Final = 2048
"""Bits of the largest number that evaluating a size can make."""

_MAX_EXPANDED: Final = 64
"""Summands of a size that is multiplied out."""

_MAX_EXPONENT: Final = 8
_NUMBER_BITS: Final = 64
_SYMBOL: Final = re.compile(r"[su]\d{1,6}", re.ASCII)
_FLOAT: Final = re.compile(r"-?\d{1,24}(?:\.\d{0,24})?(?:e[+-]?\d{1,2})?", re.ASCII)
_FLAGS: Final = frozenset({"integer", "positive", "nonnegative", "nonzero", "real", "finite"})
_PRECISIONS: Final = range(1, 65)
_MANY: Final = (1, 16)
_ARGUMENTS: Final = {
    **dict.fromkeys(("Add", "Mul", "Max", "Min", "And", "Or"), _MANY),
    **dict.fromkeys(("Integer", "Not", "ToFloat"), (1, 1)),
    **dict.fromkeys(
        (
            "Rational", "Pow", "Mod", "PythonMod", "FloorDiv", "CleanDiv", "CeilDiv", "IntTrueDiv", "Equality",
            "Unequality", "Eq", "Ne", "GreaterThan", "LessThan", "StrictGreaterThan", "StrictLessThan",
        ),
        (2, 2),
    ),
    "ModularIndexing": (3, 3),
}  # fmt: skip
"""How few and how many arguments each function takes, besides Symbol and Float."""


class NoSizeError(ValueError):
    """A text is no size, or one that would become large."""


def count_terms(text: str) -> int:
    """Return the number of terms in a size. NoSizeError unless it follows the grammar and stays small."""
    if len(text) > MAX_LETTERS:
        raise NoSizeError("it is long")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NoSizeError("it is no expression") from None
    reader = _SizeReader()
    reader.read(tree.body, 0)
    return reader.terms


@dataclass(frozen=True, slots=True)
class _Bound:
    """What a part of a size can become: a number of so many bits, and so many summands."""

    bits: int
    summands: int = 1


_UNKNOWN: Final = _Bound(_NUMBER_BITS)


@final
class _SizeReader:
    def __init__(self) -> None:
        self.terms = 0

    def read(self, node: ast.expr, depth: int) -> _Bound:
        """Return what an expression can become."""
        self.terms += 1
        if self.terms > MAX_TERMS or depth > _MAX_DEPTH:
            raise NoSizeError("it has many terms")
        bound = self._bound(node, depth + 1)
        if bound.bits > _MAX_BITS or bound.summands > _MAX_EXPANDED:
            raise NoSizeError("it would become large")
        return bound

    def _bound(self, node: ast.expr, depth: int) -> _Bound:
        if isinstance(node, ast.Constant):
            return _number(node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return self.read(node.operand, depth)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise NoSizeError("it holds something else than calls and numbers")
        name, arguments = node.func.id, node.args
        if name in ("Symbol", "Float"):
            return _leaf(name, node)
        fewest, most = _ARGUMENTS.get(name, (1, 0))
        if node.keywords or not fewest <= len(arguments) <= most:
            raise NoSizeError(f"it calls {name[:32]} in another way than known here")
        if name == "Pow":
            base, exponent = self.read(arguments[0], depth), abs(_integer(arguments[1]))
            if exponent > _MAX_EXPONENT:
                raise NoSizeError("it has a large exponent")
            return _Bound(base.bits * max(exponent, 1), min(base.summands**exponent, _MAX_EXPANDED + 1))
        parts = [self.read(part, depth) for part in arguments]
        if name == "Mul":
            summands = 1
            for part in parts:
                summands = min(summands * part.summands, _MAX_EXPANDED + 1)
            return _Bound(sum(part.bits for part in parts), summands)
        bits = max(part.bits for part in parts)
        return _Bound(bits + len(parts), sum(part.summands for part in parts)) if name == "Add" else _Bound(bits)


def _number(value: Any) -> _Bound:
    if isinstance(value, float):
        return _UNKNOWN
    if not isinstance(value, int) or value.bit_length() > _NUMBER_BITS:
        raise NoSizeError("it holds something else than numbers of 64 bits")
    return _Bound(max(value.bit_length(), 1))


def _integer(node: ast.expr) -> int:
    """Return the number that an exponent is written as."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Integer":
        (node,) = node.args if len(node.args) == 1 and not node.keywords else (node,)
    sign = 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        sign, node = -1, node.operand
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return sign * node.value
    raise NoSizeError("it has an exponent that is no number")


def _leaf(name: str, node: ast.Call) -> _Bound:
    """Return the bound of a symbol or of a decimal number, which are written as texts with flags."""
    text = node.args[0].value if len(node.args) == 1 and isinstance(node.args[0], ast.Constant) else None
    pattern = _SYMBOL if name == "Symbol" else _FLOAT
    flags = {word.arg: word.value.value if isinstance(word.value, ast.Constant) else None for word in node.keywords}
    if name == "Symbol":
        fine = flags.keys() <= _FLAGS and all(type(flag) is bool for flag in flags.values())
    else:
        fine = flags.keys() <= {"precision"} and all(flag in _PRECISIONS for flag in flags.values())
    if not (isinstance(text, str) and pattern.fullmatch(text) and fine):
        raise NoSizeError(f"it holds a {name} that is not known here")
    return _UNKNOWN
