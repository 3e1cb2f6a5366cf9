"""Sizes in saved graphs are small expressions, which cannot become large while they are evaluated."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from batchmaker.saved.size_check import MAX_TERMS, NoSizeError, count_terms

S0 = "Symbol('s0', positive=True, integer=True)"


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        (S0, 1),
        ("Symbol('u17', integer=True)", 1),
        ("12", 1),
        ("-12", 2),
        (f"Mul(Integer(4), {S0})", 4),
        (f"Add({S0}, Integer(-1))", 5),
        (f"FloorDiv({S0}, Integer(2))", 4),
        (f"Add(Integer(1), FloorDiv(Add({S0}, Integer(-3)), Integer(2)))", 11),
        (f"Max(Integer(1), PythonMod({S0}, Integer(8)))", 7),
        (f"Mul(Rational(1, 2), Pow({S0}, Integer(2)))", 6),
        (f"Pow({S0}, Integer(-1))", 2),
        (f"ModularIndexing({S0}, Integer(4), Integer(8))", 6),
        (f"Mul(Float('0.10000000000000001', precision=53), ToFloat({S0}))", 4),
        (f"Eq(Mod({S0}, 2), 0)", 5),
    ],
)
def test_what_torch_writes_is_taken(text, terms):
    assert count_terms(text) == terms


@pytest.mark.parametrize(
    "text",
    [
        "Pow(9, Pow(9, 9))", "Pow(Integer(9), Integer(999999999))", "Pow(Integer(9), 9)", "Pow(2, Symbol('s0'))",
        "Pow(Pow(Pow(Pow(Integer(99), 8), 8), 8), 8)", "Pow(Add(Symbol('s0'), Symbol('s1')), 8)",
        "Float('1e999999999')", "Float('1e999')", "Float('1', precision=999999999)", "Float('nan')", "Float('9' * 9)",
        "Integer(99999999999999999999999)", "Integer('9' * 9999)", "9 ** 9 ** 9", "1 << 999999999", "'a' * 9",
        "Mul(" + ", ".join(["Add(Symbol('s0'), Symbol('s1'))"] * 8) + ")",
        "Mul(" + ", ".join(["Integer(18446744073709551615)"] * 16) + ", 2)",
        "Add(" + ", ".join(["Mul(Symbol('s0'), Integer(7))"] * 16) + ", Integer(1))",
        "Max(" + ", ".join([f"Symbol('s{n}')" for n in range(40)]) + ")",
        "Add(" * 40 + "1" + ")" * 40, "(" * 900 + "1" + ")" * 900, "-" * 300 + "1",
        "Symbol('s0').__class__", "Symbol('x')", "Symbol('s0', 'integer')", "Symbol('s0', integer=2)",
        "Symbol('s0', commutative=False)", "Symbol('s0', **{'integer': True})", "Symbol(*['s0'])", "Add(*[1, 2])",
        "Integer()", "Integer(1, 2)", "Add()", "Add(1, evaluate=False)", "Mod(1)", "ModularIndexing(1, 2)",
        "factorial(9)", "Lambda(1, 2)", "lambda: 1", "[1 for _ in ()]", "[1]", "(1, 2)", "{}",
        "s0", "None", "1j", "b'1'", "'1'", "",
        " ", "1;2", "__import__('os')", "1 if 1 else 2", "x := 1", "1\n+1", "\0", "Integer(1" + " " * 3000 + ")",
    ],
)  # fmt: skip
def test_anything_else_is_refused(text):
    with pytest.raises(NoSizeError):
        count_terms(text)


def calls(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    many = st.builds(
        lambda name, given: f"{name}({', '.join(given)})",
        st.sampled_from(["Add", "Mul", "Max", "Min"]), st.lists(inner, min_size=1, max_size=4),
    )  # fmt: skip
    power = st.builds(lambda base, n: f"Pow({base}, Integer({n}))", inner, st.integers(-3, 9))
    return many | power | inner.map(lambda text: f"-{text}")


NUMBERS = st.integers(-(1 << 66), 1 << 66).map(lambda n: f"Integer({n})") | st.integers(0, 9).map(str)


@given(st.recursive(NUMBERS | st.sampled_from([S0, "Symbol('s1')"]), calls, max_leaves=30))
def test_what_is_taken_has_small_numbers_once_it_is_evaluated(text):
    try:
        terms = count_terms(text)
    except NoSizeError:
        return
    assert 1 <= terms <= MAX_TERMS
    try:
        evaluated: Any = sympy.expand(sympy.sympify(text))
    except ValueError:  # sympy compares no infinity; then nothing is evaluated, and there are no numbers
        return
    if not evaluated.has(sympy.zoo, sympy.nan):
        parts = [part for number in evaluated.atoms(sympy.Rational) for part in (number.p, number.q)]
        assert max((int(part).bit_length() for part in parts), default=0) < 10_000
    assert len(sympy.Add.make_args(evaluated)) <= 100
