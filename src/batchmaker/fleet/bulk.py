"""Many more rows than fit in memory through a model, on all cores of a Ray cluster."""

from __future__ import annotations

import hashlib
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, final

import msgspec
import numpy as np
import torch

from batchmaker import errors
from batchmaker.errors import BatchmakerError, DataError, OptionError
from batchmaker.fleet.blocks import (
    Format,
    Row,
    RowBlock,
    cut_into_blocks,
    find_files,
    json_text,
    part_of,
    read_block,
    write_part,
)
from batchmaker.fleet.on_ray import connect

_ABOUT: Final = "blocks.json"
_DATASET: Final = "input"
_ERROR: Final = "error"

OnError = Literal["raise", "column"]


class BulkSummary(msgspec.Struct, frozen=True):
    """What `map` has done. rows: of the whole input. computed: of them now, not before a crash. failed: with an error.

    wall_s: seconds of this call. out: the folder of the output.
    """

    out: str
    blocks: int
    rows: int
    computed: int
    failed: int
    wall_s: float


class _About(msgspec.Struct, frozen=True):
    """What the output folder is the output of."""

    mark: str
    form: Format
    blocks: list[RowBlock]


class _Plan(msgspec.Struct, frozen=True):
    """What a worker must know."""

    model: str
    column: str | None
    result: str
    on_error: OnError
    form: Format
    out: str
    folder: str
    options: dict[str, Any]
    threads: int = 1


def map(  # noqa: A001 - called as fleet.map
    data: Any,
    model: str,
    out: str | Path,
    *,
    column: str | None = None,
    result: str = "result",
    block_rows: int = 10_000,
    workers: int | None = None,
    cpus: float = 1.0,
    on_error: OnError = "raise",
    progress: bool = True,
    ray_address: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> BulkSummary:
    """Compute a model for every row of a data set; return counts when all output is written.

    data: a Parquet file (.parquet), a file of JSON lines (.jsonl, .ndjson), a folder of either, or a ray.data.Dataset.
    Workers must be able to read it, `model` and `out`. model: as for `batchmaker serve`. column: which holds the
    request; None to give the model the whole row as a dict. result: the new column; a result that is a dict or tuple
    has a column for each part, as in result_total or result_0.

    out: a folder, where one file for each block of `block_rows` rows appears, in the input's format and order:
    part-000000 and so on, with the input's columns and the new ones. Called again after a crash, blocks whose files are
    there are not computed again. The folder belongs to its input and options: DataError for others.

    workers: engines, each on `cpus` cores with as many compute threads (at least 1); None for as many as there are
    cores. A worker holds one block in memory.
    on_error: whether a failing row ends it all (the first error is raised, finished blocks stay), or is noted in the
    column "error". options: of the engines, such as policy. Raises OptionError and DataError before anything runs.
    """
    ray = connect(ray_address)
    begin_s = time.perf_counter()
    if on_error not in ("raise", "column"):
        raise OptionError(f"on_error must be 'raise' or 'column', got {on_error!r}")
    folder = Path(out).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    settings = (model, column, result, block_rows, on_error, sorted((options or {}).items()))
    about = _prepared(data, folder, block_rows, settings)
    plan = _Plan(
        model, column, result, on_error, about.form, str(folder), os.getcwd(), dict(options or {}), max(1, int(cpus))
    )
    missing = [block for block in about.blocks if not part_of(folder, block.number, about.form).exists()]
    rows = sum(block.num_rows for block in about.blocks)
    done, failed = rows - sum(block.num_rows for block in missing), 0
    computed = 0
    if missing:
        cores = math.floor(float(ray.cluster_resources().get("CPU", 1)) / cpus)
        count = max(1, min(workers or cores, len(missing)))
        shown = progress and sys.stderr.isatty()
        for written in _computed(plan, missing, count, cpus):
            computed, failed = computed + int(written["rows"]), failed + int(written["failed"])
            if shown:
                rate = computed / (time.perf_counter() - begin_s)
                print(f"\r{done + computed:,} of {rows:,} rows, {rate:,.0f}/s", end="", file=sys.stderr, flush=True)
        if shown:
            print(file=sys.stderr)
    return BulkSummary(str(folder), len(about.blocks), rows, computed, failed, time.perf_counter() - begin_s)


def _prepared(data: Any, out: Path, block_rows: int, settings: tuple[Any, ...]) -> _About:
    """Return the blocks of the input, as they were cut by the first call for this folder."""
    about_path = out / _ABOUT
    is_path = isinstance(data, str | os.PathLike)
    files, form = find_files(Path(data)) if is_path else ([], "parquet")
    stamps = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    mark = hashlib.sha256(repr((stamps, settings)).encode()).hexdigest()
    if about_path.exists():
        about = msgspec.json.decode(about_path.read_bytes(), type=_About)
        if about.mark != mark:
            raise DataError(
                f"{out} holds the output of another input, model or options; give another folder, or empty this one"
            )
        return about
    if any(out.glob("part-*")):
        raise DataError(f"{out} holds parts of something else; give another folder, or empty this one")
    if not is_path:
        files = _written(data, out / _DATASET, block_rows)
    about = _About(mark, form, cut_into_blocks(files, form, block_rows))
    written = about_path.with_suffix(".writing")
    written.write_bytes(msgspec.json.encode(about))
    os.replace(written, about_path)
    return about


def _written(dataset: Any, folder: Path, block_rows: int) -> list[Path]:
    """Write a data set of Ray's into files, in its order, so that a block of it can be computed again."""
    if not hasattr(dataset, "iter_batches"):
        raise OptionError(f"data must be a path or a ray.data.Dataset, got {type(dataset).__name__}")
    from pyarrow import parquet

    folder.mkdir(exist_ok=True)
    dataset.context.execution_options.preserve_order = True
    files = []
    for number, table in enumerate(dataset.iter_batches(batch_size=block_rows, batch_format="pyarrow")):
        files.append(folder / f"block-{number:06d}.parquet")
        parquet.write_table(table, files[-1])
    if not files:
        raise DataError("the data set has no rows")
    return files


def _computed(plan: _Plan, blocks: list[RowBlock], count: int, cpus: float) -> Any:
    """Yield what was written, block by block, in whatever order they are finished. Raises the first error of a row."""
    from ray import data

    data.DataContext.get_current().enable_progress_bars = False
    items = [{"block": msgspec.json.encode(block)} for block in blocks]
    written = data.from_items(items, override_num_blocks=len(items)).map_batches(
        BulkWorker,
        fn_constructor_args=(msgspec.json.encode(plan),),
        batch_size=1,
        compute=data.ActorPoolStrategy(size=count),
        num_cpus=cpus,
        max_concurrency=1,
    )
    for row in written.iter_rows():
        if row["error"]:  # Ray Data would keep only the text of an exception
            kind, _, said = str(row["error"]).partition(": ")
            raise getattr(errors, kind, BatchmakerError)(said)
        yield row


@final
class BulkWorker:
    """An engine in a process of Ray Data's. Given a batch of one block, it computes the block and writes its file."""

    def __init__(self, plan: bytes) -> None:
        from batchmaker.engine.engine import Engine
        from batchmaker.saved.sources import one_model, parse_source

        self._plan = msgspec.json.decode(plan, type=_Plan)
        if Path(self._plan.folder).is_dir():
            os.chdir(self._plan.folder)
        threads = self._plan.threads
        model = one_model(parse_source(self._plan.model))
        self._engine = Engine(model, threads=threads, **{"policy": None, **self._plan.options})
        self._engine.start()

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        (content,) = batch["block"]
        block = msgspec.json.decode(content, type=RowBlock)
        try:
            failed, error = self._compute(block), ""
        except BatchmakerError as raised:
            failed, error = 0, f"{type(raised).__name__}: {raised}"
        return {"rows": [block.num_rows], "failed": [failed], "error": [error]}

    def _compute(self, block: RowBlock) -> int:
        """Compute a block and write it; return how many rows failed. Raises BatchmakerError."""
        plan = self._plan
        rows = read_block(block, plan.form)
        requests = [row if plan.column is None else _column(row, plan.column, block) for row in rows]
        failed = 0
        try:
            results = self._engine.map(requests, progress=False, deadline_ms=math.inf)
            why: list[str | None] = [None] * len(rows)
        except BatchmakerError:
            if plan.on_error == "raise":
                raise
            results, why = self._one_by_one(requests)
            failed = sum(error is not None for error in why)
        for row, value, error in zip(rows, results, why, strict=True):
            if error is None:
                _add(row, plan.result, value, plan.form)
            if plan.on_error == "column":
                row[_ERROR] = error
        if failed:
            _fill(rows)
        write_part(Path(plan.out), block.number, plan.form, rows)
        return failed

    def close(self) -> None:
        """End the engine."""
        self._engine.stop()

    def _one_by_one(self, requests: list[Any]) -> tuple[list[Any], list[str | None]]:
        """Compute the block again, so that each failing row fails alone."""
        answers = [self._engine.submit(request, deadline_ms=math.inf) for request in requests]
        results: list[Any] = []
        why: list[str | None] = []
        for answer in answers:
            error = answer.exception()
            results.append(None if error is not None else answer.result())
            why.append(None if error is None else f"{type(error).__name__}: {error}")
        return results, why


def _column(row: Row, name: str, block: RowBlock) -> Any:
    if name not in row:
        raise DataError(f"{block.path}: a row has no column {name!r}; it has {', '.join(row)}")
    return row[name]


def _add(row: Row, name: str, value: Any, form: Format) -> None:
    """Add a result to its row, as what its format holds."""
    if isinstance(value, dict):
        parts = {f"{name}_{key}": part for key, part in value.items()}
    elif isinstance(value, tuple):
        parts = {f"{name}_{number}": part for number, part in enumerate(value)}
    else:
        parts = {name: value}
    for key, part in parts.items():
        if key in row:
            raise DataError(f"the input has a column {key!r} already; give another name: result=...")
        row[key] = _plain(part, form)


def _plain(value: Any, form: Format) -> Any:
    """Return a result with tensors and arrays as lists; for JSON lines as text, which takes half as long to write."""
    if isinstance(value, torch.Tensor):
        value = (value.float() if value.dtype is torch.bfloat16 else value).numpy(force=True)
    if isinstance(value, np.ndarray | np.generic):
        return json_text(value) if form == "jsonl" and isinstance(value, np.ndarray) else value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(one, form) for one in value]
    return value


def _fill(rows: list[Row]) -> None:
    """Give all rows the same columns."""
    names = dict.fromkeys(name for row in rows for name in row)
    for row in rows:
        for name in names:
            row.setdefault(name, None)
