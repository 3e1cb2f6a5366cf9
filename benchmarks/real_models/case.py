"""One example beside its package and beside batches by hand: what all of them are asked, and how answers are compared.

A new one is a file here with a function that takes a Data and returns a Case, and a line in CASES of examples.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import batchmaker as bm
from batchmaker.saved import python_file
from engine_cost.hand_server import Run
from engine_cost.measuring import NotRunError

ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Data:
    """Where texts and lengths come from, and how much of them.

    folder: has europarl_deen, weibo_ner and librispeech_durations. quick: so little that figures mean nothing. dynet:
    the interpreter of an environment with DyNet and nagisa before 0.3, None without one.
    """

    folder: Path
    quick: bool = False
    dynet: Path | None = None

    def of(self, full: int, quick: int) -> int:
        """Return the value for this run."""
        return quick if self.quick else full


@dataclass(frozen=True, slots=True)
class Peer:
    """Another program that computes the same, in a process of its own.

    rate: requests per CPU second at its best settings. answers: what it made of the requests, in order. setting: which
    settings were the best. seen: the rate of each.
    """

    rate: float
    answers: Sequence[Any]
    setting: str
    seen: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Live:
    """How many live streams a core holds: by side, where so many streams have one chunk in flight each."""

    per_core: Mapping[str, float]
    streams: int


@dataclass(frozen=True, slots=True)
class Case:
    """The same requests answered by the example, by batches by hand, and by the package.

    asked: what clients send, a word or a sentence. model: the example's. encode, decode: between that and what the
    network takes and gives; both are done by the engine's side and by hand. by_hand: what takes a batch of encoded
    requests and returns results as the engine gives them. own: the package, one request after the other, from what was
    asked to the answer. same: whether two answers agree. target: the ratio that was asked for, over the better of
    batches by hand and the package, or over `peer`. live: measures live streams, where requests can come as such.
    """

    package: str
    about: str
    asked: Sequence[Any]
    model: bm.Model
    by_hand: Mapping[str, Run]
    own: Callable[[Any], Any]
    same: Callable[[Any, Any], bool]
    target: float
    sizes: Sequence[int] = (16, 64, 256)
    encode: Callable[[Any], Any] = lambda asked: asked
    decode: Callable[[Any, Any], Any] = lambda result, asked: result
    length: Callable[[Any], int] = len
    own_count: int = 200
    peer: Callable[[Sequence[Any]], Peer] | None = None
    peer_name: str = ""
    live: Callable[[Data, bm.Engine], Live] | None = None


def example(name: str, package: str) -> bm.Model:
    """Return the model of an example. NotRunError without the package that has its weights."""
    if find_spec(package) is None:
        raise NotRunError(f"needs {package}: pip install 'batchmaker[examples]'")
    return python_file.build(ROOT / "examples" / name / f"{name}.py", {})


def text(data: Data, *path: str) -> str:
    """Return a file of the data folder. NotRunError without it."""
    file = data.folder.joinpath(*path)
    if not file.is_file():
        raise NotRunError(f"needs {'/'.join(path)} in the data folder")
    return file.read_text("utf-8")
