"""`batchmaker run`."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, final

import numpy as np
import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from batchmaker.cli import options
from batchmaker.cli.given_model import OwnModel, given_model
from batchmaker.cli.policy_model import warn_of_another_model
from batchmaker.cli.requests import LATTICES, MATRICES, TREES, requests_from
from batchmaker.cli.workload import ATTENTION, DEPENDENCIES, RECURRENT, SPEECH, TRANSLATION_WORDS
from batchmaker.engine.answer import Answer
from batchmaker.engine.engine import Engine
from batchmaker.engine.request import Ticket
from batchmaker.errors import BatchmakerError, DataError, OptionError
from batchmaker.lab import zoo
from batchmaker.lab.datasets import Vocabulary, parse_tree, read_lines
from batchmaker.model.model import Model
from batchmaker.saved.sources import BuiltIn, one_model

MAX_IN_FLIGHT = 4096
FOUND_IN_FILES = ("vocabulary_size", "alphabet", "words", "labels", "max_arity")
"""Options of built-in models that the words and labels of a file give."""
STRUCTURED = (*LATTICES, "bilstm-tagger-char")
"""Models whose requests are JSON objects, one per line, or items of a data file, as for `batchmaker learn`."""

Encode = Callable[[Any], Any]
"""One line of input, or an item of a data file -> a request. Raises BatchmakerError for an invalid line."""

Show = Callable[[Any], Any]
"""A result -> its JSON form for the output."""


def run(
    model: options.ModelName,
    source: Annotated[
        Path,
        typer.Option(
            "--input",
            help="Lines of text, trees in brackets, JSON arrays (images, spectrograms) or requests (lattices, "
            "dependency trees, models of your own), or a file of lattices or word|TAG.",
        ),
    ],
    output: Annotated[Path, typer.Option(help="One JSON object per line of input, in its order.")],
    hidden: options.Hidden = None,
    layers: options.Layers = None,
    dtype: options.Dtype = options.DTYPE,
    policy: Annotated[
        str | None,
        typer.Option(help="What runs next: cellular, padded, learned:file=FILE, ... Default: auto on a CPU."),
    ] = None,
    threads: options.Threads = None,
    workers: options.Workers = None,
    device: options.Device = "cpu",
    max_batch: options.MaxBatch = None,
    deadline_ms: options.DeadlineMs = None,
    seed: options.Seed = 0,
) -> None:
    """Push a file through a model, all lines batched together.

    Each line of output has "index" and "result" and "latency_ms", or "index" and "error": a bad line fails alone, and
    the exit status is 1. Empty lines are skipped; in a file of lattices or word|TAG, "index" counts requests. Requests
    that are not done within --deadline-ms are given up.

    A model of your own reads requests as JSON, one a line: [3, 4, 5], or {"source": [3, 4, 5]} if unfold has several
    parameters.

    [bold]Examples[/bold]

    batchmaker run lstm --input text.txt --output states.jsonl

    batchmaker run seq2seq --input europarl.de --output words.jsonl --hidden 512

    batchmaker run treelstm --input sst/test.txt --output roots.jsonl

    batchmaker run saved/translator --input requests.jsonl --output results.jsonl

    batchmaker run translator.py:hidden=64 --input requests.jsonl --output results.jsonl
    """
    options.check_writable(output)
    named = given_model(model, hidden=hidden, layers=layers, dtype=dtype, max_batch=max_batch)
    built, numbered, encode, show = _model_and_requests(named, source, seed)
    with Engine(
        built, policy, workers=workers or "auto", threads=threads, device=device, deadline_ms=deadline_ms
    ) as engine:
        # policies for other cells have been refused
        warn_of_another_model(policy, named.network if isinstance(named, BuiltIn) else named.name)
        answers = _Answers(engine, [index for index, _ in numbered], show)
        answers.collect([line for _, line in numbered], encode)
    answers.write(output)
    _report(answers, len(numbered), output)


def _model_and_requests(
    named: BuiltIn | OwnModel, source: Path, seed: int
) -> tuple[Model, list[tuple[int, Any]], Encode, Show]:
    """Return the model, its numbered lines or items, their conversion to requests, and the JSON form of results.

    seed: of a built-in model. Raises OptionError for options that it does not have, DataError for an unusable file.
    """
    lines = read_lines(source)
    numbered: list[tuple[int, Any]] = [(index, line) for index, line in enumerate(lines) if line.strip()]
    if not numbered:
        raise DataError(f"{source}: there is nothing in this file; expected one request a line.")
    if not isinstance(named, BuiltIn):
        return one_model(named), numbered, options.parse_json, plain
    model, model_options = named.network, {"seed": seed, **named.options}
    if model in STRUCTURED and not numbered[0][1].lstrip().startswith("{"):
        built, numbered = _data_file(model, source, model_options)
        return built, numbered, _as_it_is, plain
    built, encode, show = _built_in(model, [line for _, line in numbered], model_options)
    return built, numbered, encode, show


def _report(answers: _Answers, num_requests: int, output: Path) -> None:
    """Print how many requests were answered. Exits with status 1 if some have failed."""
    console = options.err()
    failed = answers.num_failed
    said = f"{num_requests - failed} of {num_requests} requests answered: {output}"
    console.print(said, markup=False, highlight=False, soft_wrap=True)
    if failed:
        said = f"{failed} failed; the first: {answers.first_error}"
        console.print(said, style="yellow", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1)


def _built_in(name: str, lines: list[str], model_options: dict[str, Any]) -> tuple[Model, Encode, Show]:
    """Return the model, the conversion of lines to requests, and the JSON form of results. The words are the file's."""
    options.check_model(name, **model_options)
    if "vocabulary_size" not in zoo.option_names(name) or name in SPEECH:
        return options.make_model(name, **model_options), _parse_array, plain
    if name in STRUCTURED or name == DEPENDENCIES:
        return options.make_model(name, **model_options), options.parse_json, plain
    _refuse(model_options, FOUND_IN_FILES[:1])
    if name in TREES:
        trees = {line: parsed for line in lines if (parsed := _try_tree(line)) is not None}
        words = [tree.words for tree in trees.values()] or [("word",)]
        vocabulary = Vocabulary.from_sentences(words, MATRICES if name == "mvrnn" else None)
        tree_model: Any = options.make_model(name, vocabulary_size=len(vocabulary), **model_options)
        return tree_model, lambda line: tree_model.encode(trees.get(line) or parse_tree(line), vocabulary), plain
    vocabulary = Vocabulary.from_lines(lines, max_size=TRANSLATION_WORDS)
    built = options.make_model(name, vocabulary_size=len(vocabulary), **model_options)
    if name in RECURRENT or name in ATTENTION:
        return built, vocabulary.encode, lambda result: vocabulary.decode(np.asarray(result).reshape(-1))
    return built, vocabulary.encode, plain


def _data_file(name: str, source: Path, model_options: dict[str, Any]) -> tuple[Model, list[tuple[int, Any]]]:
    """Return a model for a data file, and its numbered requests. DataError if it is not a data file."""
    options.check_model(name, **model_options)
    _refuse(model_options, FOUND_IN_FILES)
    try:
        requests = requests_from(name, source, **model_options)
    except DataError as error:
        raise DataError(f"{error} For requests of {name}, give JSON lines, or a file as `learn` reads it.") from None
    return requests.model, list(enumerate(requests.requests))


def _refuse(model_options: dict[str, Any], names: tuple[str, ...]) -> None:
    """Raise OptionError if one of the options was given that are found in the file."""
    for name in names:
        if name in model_options:
            raise OptionError(f"{name} is found in the file; leave it out")


def _as_it_is(request: Any) -> Any:
    return request


def _try_tree(line: str) -> Any:
    try:
        return parse_tree(line)
    except DataError:
        return None


def _parse_array(line: str) -> Any:
    try:
        return np.asarray(options.parse_json(line), np.float32)
    except (TypeError, ValueError) as error:
        raise DataError(f"not an array of numbers: {error}") from None


def plain(result: Any) -> Any:
    """Return a result as lists, numbers and strings only."""
    if isinstance(result, torch.Tensor):
        return result.tolist()
    if isinstance(result, np.ndarray | np.generic):
        return result.tolist()
    if isinstance(result, dict):
        return {str(key): plain(value) for key, value in result.items()}
    if isinstance(result, list | tuple):
        return [plain(value) for value in result]
    return result


@final
class _Answers:
    """Submits requests, at most MAX_IN_FLIGHT at a time, and stores each answer at its place."""

    def __init__(self, engine: Engine, indices: list[int], show: Show) -> None:
        self._engine = engine
        self._indices = indices
        self._show = show
        self._lines: list[dict[str, Any]] = [{} for _ in indices]
        self._latency_ms: dict[int, float] = {}
        self._room = threading.Semaphore(MAX_IN_FLIGHT)
        engine.on_settled = self._note

    def collect(self, lines: list[Any], encode: Encode) -> None:
        """Compute the answers of all lines."""
        console = options.err()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        waiting: list[tuple[int, Answer]] = []
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("requests", total=len(lines))
            for place, line in enumerate(lines):
                try:
                    request = encode(line)
                except BatchmakerError as error:
                    self._fail(place, error)
                    bar.advance(task)
                    continue
                self._room.acquire()
                answer = self._engine.submit(request)
                answer.add_done_callback(lambda _: self._answered(bar, task))
                waiting.append((place, answer))
            for place, answer in waiting:
                self._take(place, answer)

    def _answered(self, bar: Progress, task: TaskID) -> None:
        self._room.release()
        bar.advance(task)

    def _take(self, place: int, answer: Answer) -> None:
        try:
            result = self._show(answer.result())
        except BatchmakerError as error:
            self._fail(place, error)
            return
        self._lines[place] = {"index": self._indices[place], "result": result}
        self._lines[place]["latency_ms"] = round(self._latency_ms[answer.request_id], 3)

    def _fail(self, place: int, error: BatchmakerError) -> None:
        self._lines[place] = {"index": self._indices[place], "error": str(error)}

    def _note(self, ticket: Ticket, error: BaseException | None) -> None:
        self._latency_ms[ticket.request_id] = 1e3 * (ticket.latency_s or 0.0)

    @property
    def num_failed(self) -> int:
        return sum("error" in line for line in self._lines)

    @property
    def first_error(self) -> str:
        return next(f"line {line['index'] + 1}: {line['error']}" for line in self._lines if "error" in line)

    def write(self, path: Path) -> None:
        """Write all answers in order of input."""
        try:
            with path.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in self._lines)
        except OSError as error:
            raise DataError(f"{path}: cannot be written ({error.strerror or error}).") from error
