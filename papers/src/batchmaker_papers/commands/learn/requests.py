"""Requests to learn from: of built-in networks, in their data formats, and of saved models, as JSON lines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from batchmaker.cli.options import parse_json
from batchmaker.cli.requests import WORKLOADS, Fitted, fit, lattice_words_misplaced
from batchmaker.cli.workload import ATTENTION, PLACES, TEXT_PLACES
from batchmaker.errors import DataError, OptionError, unknown_name
from batchmaker.lab import zoo
from batchmaker.lab.datasets import read_lines

TEXTS: Final = ("lstm", "gru", "bert")
"""Networks that take lines of text."""
TRANSLATORS: Final = ("seq2seq", *ATTENTION)
"""Networks that take two aligned files; lstm-nmt is in WORKLOADS."""
LEARNABLE: Final = (*WORKLOADS, *TEXTS, *TRANSLATORS)
"""Built-in models whose requests can be read from files."""
ANY_WORD: Final = 3
"""The id of every word if no graph depends on the word."""


@final
@dataclass(frozen=True, slots=True)
class JsonRequest:
    """A request of a saved model. where: file and line, for errors."""

    request: Any
    where: str


def is_saved(model: str) -> bool:
    """Return whether this is the directory of a saved model, with the rule of `batchmaker run`.

    Otherwise it must be in LEARNABLE; if not, OptionError lists the valid models.
    """
    if model in LEARNABLE:
        return False
    if model in zoo.MODELS:
        raise OptionError(
            f"{model} has generated requests only, so there is none to learn from. A policy is learnt for "
            f"{', '.join(LEARNABLE)}, or for the directory of a saved model with its requests as JSON lines."
        )
    if not Path(model).is_dir():
        raise unknown_name("model (and no directory of a saved one)", model, LEARNABLE)
    return True


def read_requests(name: str, path: Path, *, words: Path | None = None, seed: int = 0) -> Fitted:
    """Return the requests of a file, in its order, for a built-in model of LEARNABLE or a saved one.

    Lines of text for TEXTS; for TRANSLATORS the source of two aligned files that share a stem; a JSON value a line for
    saved models; as `requests_from` for the others. Raises DataError, naming file and line, and OptionError.
    """
    if name in WORKLOADS:
        return fit(name, path, words=words, seed=seed)
    if words is not None:
        raise lattice_words_misplaced()
    if name in TRANSLATORS:
        return _translations(name, path)
    return _texts(name, path) if name in TEXTS else _json_lines(path)


def _translations(name: str, path: Path) -> Fitted:
    most = PLACES if name in ATTENTION else None

    def encode(_: Any, pair: Any) -> dict[str, Any]:
        return {"source": _ids(len(pair.source_tokens[:most])), "words": len(pair.target_tokens[:most])}

    return Fitted(fit("lstm-nmt", path).items, {}, encode, path.name)


def _texts(name: str, path: Path) -> Fitted:
    most = TEXT_PLACES if name == "bert" else None
    lengths = [len(line.split()[:most]) for line in read_lines(path) if line.strip()]
    return Fitted(lengths, {}, lambda _, length: _ids(length), path.name)


def _ids(count: int) -> Any:
    return np.full(count, ANY_WORD, np.int64)


def _json_lines(path: Path) -> Fitted:
    items = []
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            items.append(JsonRequest(parse_json(line), where))
        except DataError as error:
            raise DataError(f"{where}: {error}; expected a request of the saved model, a JSON value.") from None
    return Fitted(items, {}, lambda _, item: item, path.name)
