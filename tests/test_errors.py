"""The exception tree is what its docstring draws, and unknown names are refused with the nearest one."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from batchmaker import errors


def drawn_tree() -> dict[str, str]:
    """Each error named in the module's docstring, with the one that it hangs from."""
    parents: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in inspect.getdoc(errors).splitlines():
        match = re.match(r"[ │├└─]*(\w+Error)\b", line)
        if match is None:
            continue
        column, name = match.start(1), match[1]
        above = [(left, parent) for left, parent in above if left < column]
        parents[name] = above[-1][1] if above else "Exception"
        above.append((column, name))
    return parents


def written_tree() -> dict[str, str]:
    """Each error class of the module, with its base."""
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    return {cls.__name__: cls.__bases__[0].__name__ for cls in classes if cls.__module__ == errors.__name__}


def test_docstring_draws_every_error_under_its_base():
    assert drawn_tree() == written_tree()


def test_every_error_is_a_batchmaker_error_and_says_what_it_means():
    for name in written_tree():
        cls = getattr(errors, name)
        assert issubclass(cls, errors.BatchmakerError)
        assert cls.__dict__.get("__doc__"), f"{name} has no docstring"


def test_the_page_for_model_authors_says_of_every_error_what_to_do():
    page = (Path(__file__).parent.parent / "docs" / "models.md").read_text("utf-8")
    table = page.partition("## Errors, and what to do")[2].partition("\n## ")[0]
    assert [name for name in written_tree() if f"`{name}`" not in table] == ["RequestError"]  # of which many kinds are


def test_unknown_name_lists_what_is_known_and_suggests_the_nearest():
    error = errors.unknown_name("policy", "celular", ["lazy", "cellular", "agenda"])
    assert str(error) == "unknown policy 'celular'; known: agenda, cellular, lazy. Did you mean 'cellular'?"


def test_unknown_name_suggests_nothing_where_nothing_is_near():
    error = errors.unknown_name("policy", "zzz", ["lazy", "cellular"])
    assert str(error) == "unknown policy 'zzz'; known: cellular, lazy."


def test_unknown_name_takes_any_iterable():
    error = errors.unknown_name("model", "lstn", (name for name in ("lstm", "gru")))
    assert str(error) == "unknown model 'lstn'; known: gru, lstm. Did you mean 'lstm'?"


def test_unknown_name_is_an_option_error_that_the_caller_raises():
    with pytest.raises(errors.OptionError, match="unknown model 'x'"):
        raise errors.unknown_name("model", "x", ["lstm"])
