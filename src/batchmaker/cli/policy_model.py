"""Checks that a learned policy belongs to the model that it drives."""

from __future__ import annotations

from pathlib import Path

from batchmaker import policies
from batchmaker.cli import options
from batchmaker.policies.learned import LearnedPolicy


def saved_name(model: str) -> str:
    """Return the model's name in policy files: a built-in's own, or a saved one's directory."""
    return Path(model).resolve().name


def warn_of_another_model(policy: str | None, model: str) -> None:
    """Warn on standard error if a learned policy was learnt for a model of another name.

    The cells may still be the same. policy: as on the command line, if given. model: a built-in's name or a saved one's
    directory.
    """
    made = None if policy is None else policies.make(policy)
    if not isinstance(made, LearnedPolicy) or made.learnt_for == saved_name(model):
        return
    options.err().print(
        f"warning: {policy}: learnt for model {made.learnt_for!r}, and {saved_name(model)!r} runs: if its cells "
        "fit, results are the same and the order may be worse than one learnt for it (`batchmaker learn`)",
        style="yellow",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
