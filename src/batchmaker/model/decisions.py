"""Decisions by computed values in unfold functions: `cond`, `switch` and `while_loop`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from batchmaker.errors import InvalidRequestError, ModelError
from batchmaker.graph.misuse import at_line
from batchmaker.graph.values import Value, ValueSequence
from batchmaker.model.region_recorder import Decisions, known_now
from batchmaker.model.scope import UnfoldingScope, current_scope


def cond(pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
    """Compute one of two branches, as a value decides. As `torch.cond`, with functions without arguments.

    pred: one bool or integer that a cell computes. A Python bool decides now, and nothing is recorded.
    true_fn, false_fn: each calls cells, or none, and returns values in the same structure. They may use all handles of
    the unfold function. Both are called once, now; only the cells of the chosen branch will run.

    Returns the structure of handles that the branches return. Data among it may be of one branch only: it becomes a
    value there. ModelError if the branches return other structures, shapes or dtypes.
    """
    if type(pred) is not Value:
        return true_fn() if known_now(pred, "cond") else false_fn()
    return _decisions("cond").choice("cond", pred, (true_fn, false_fn), is_cond=True)


def switch(index: Any, branches: Sequence[Callable[[], Any]]) -> Any:
    """Compute one of several branches: number `index`, from 0. As `jax.lax.switch`, but an index without a branch is an
    error of the request.

    index: one integer that a cell computes; a Python int decides now. branches, and what is returned: see `cond`.
    """
    branches = tuple(branches)
    if not branches:
        raise ModelError(f"{at_line()}switch has no branches")
    if type(index) is not Value:
        if isinstance(index, bool) or not isinstance(index, int | np.integer):
            raise ModelError(f"{at_line()}switch takes an integer that a cell computes, got {type(index).__name__}")
        if not 0 <= index < len(branches):
            raise InvalidRequestError(f"{at_line()}switch has {len(branches)} branches, got index {index}")
        return branches[int(index)]()
    return _decisions("switch").choice("switch", index, branches, is_cond=False)


def while_loop(
    cond_fn: Callable[[Any], Any],
    body_fn: Callable[[Any], Any],
    init: Any,
    *,
    max_steps: int,
    collect: Callable[[Any], Any] | None = None,
) -> Any:
    """Repeat a body of any cells while a value says so. As `torch.while_loop`, with one state of any structure.

    - cond_fn: state -> one bool or integer that a cell computes, or True.
    - body_fn: state -> the next state, in the same structure. It may call several cells, `cond`, `switch`, and loops.
    - init: the first state: values and data, in tuples, lists, dicts, named tuples or dataclasses.
    - max_steps: the most iterations. The loop ends after them, whatever `cond_fn` says.
    - collect: state -> one bool or integer that a cell computes: whether `.steps` gets the state after an iteration.
      Without it, `.steps` gets that of each.

    Returns the last state. `.steps` of each of its handles is the sequence of this part after each iteration. It
    streams to the caller if the unfold function returns it alone. Other cells take it as the sequence of `map`, `run`
    or a memory, and `.at` reads an element; its length is not known now. Both functions are called a few times, now.
    ModelError if the state changes its structure, its shapes or its dtypes.
    """
    if isinstance(max_steps, bool) or not isinstance(max_steps, int | np.integer):
        raise ModelError(f"{at_line()}while_loop: max_steps must be an integer, got {type(max_steps).__name__}")
    if max_steps < 0:
        raise InvalidRequestError(f"{at_line()}while_loop: max_steps must be at least 0, got {max_steps}")
    return _decisions("while_loop").loop(cond_fn, body_fn, init, int(max_steps), collect)


def of_scope(scope: UnfoldingScope) -> Decisions:
    """Return the decisions of the request that is unfolded; made at the first of them."""
    if scope.decisions is None:
        if scope.recorder.holds_values:
            raise ModelError(
                f"{at_line()}an unfold function with `yield` cannot use cond, switch, while_loop or at; "
                "decide in Python after the `yield`, or leave the `yield` out"
            )
        scope.decisions = Decisions(scope)
    return cast(Decisions, scope.decisions)


def picked(sequence: ValueSequence, index: Value) -> Value:
    """Return the element of a sequence that a value names; see ValueSequence.at."""
    return _decisions("at").pick(sequence, index)


def _decisions(what: str) -> Decisions:
    scope = current_scope.get()
    if scope is None:
        raise ModelError(f"{what} was called outside Model.unfold; hand the request to an Engine instead")
    return of_scope(scope)
