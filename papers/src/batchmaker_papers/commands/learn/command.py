"""`batchmaker learn`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from batchmaker.cli import options
from batchmaker.cli.bench.report import commit
from batchmaker.cli.policy_model import saved_name
from batchmaker.errors import unknown_name
from batchmaker.lab.plots.sweeps import Line, Panel, draw_panels
from batchmaker.policies.learned import CellRow, LearntFrom, PolicyFile
from batchmaker.policies.learned.encodings import ENCODINGS, Encoding
from batchmaker_papers.commands.learn.graphs import Graphs, read_graphs
from batchmaker_papers.commands.learn.requests import LEARNABLE
from batchmaker_papers.learners.comparison import Standing, compare
from batchmaker_papers.learners.learning import Learnt, Samples
from batchmaker_papers.learners.learning import learn as learn_table
from batchmaker_papers.learners.qlearning import Settings


def learn(
    model: Annotated[
        str, typer.Argument(help=f"A built-in model ({', '.join(LEARNABLE)}), or the directory of a saved one.")
    ],
    data: Annotated[
        Path,
        typer.Option(
            help="Requests, for a saved model as JSON lines. The first five mini-batches are counted, others learnt "
            "from."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Write the policy here; use it with --policy learned:file=PATH.")],
    batch: Annotated[int, typer.Option(min=1, help="Requests of a mini-batch.")] = 64,
    encoding: Annotated[str, typer.Option(help="States of the policy written: sort, max or base.")] = "sort",
    train_data: Annotated[Path | None, typer.Option(help="Learn from this file instead of the rest of --data.")] = None,
    words: Annotated[Path | None, typer.Option(help="A word list, to build lattices from the sentences.")] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Mini-batches that a learner plays, at most.")] = 1000,
    learners: Annotated[int, typer.Option(min=1, help="Learners that start anew; the best table counts.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Rewards that a return adds up (N).")] = 10,
    rate: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Learning rate, 0.4 in the paper. Default: means of returns.")
    ] = None,
    bootstrap: Annotated[bool, typer.Option("--bootstrap", help="Add the value of the state after N steps.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write the table of policies here, one object for each.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the learning curve here. Default: beside the policy.")] = None,
    seed: options.Seed = 0,
) -> None:
    """Learn which cell to run next, so that requests together need few batches, and compare with the known orders.

    Only graphs are made; no request is computed. Requests are unfolded in the order of the file. Tables are learnt by
    Q-learning, as in ED-Batch, on mini-batches of requests that are not counted. The compared orders are depth, agenda,
    agenda-remaining, the sufficient condition (heuristic-forward, heuristic-backward) and one table for each encoding
    of states (e_base, e_max, e_sort). No order can need fewer batches than the lower bound.

    [bold]Examples[/bold]

    batchmaker learn treelstm-2type --data sst/test.txt --batch 64 --out policy.json

    batchmaker learn latticelstm --data train.txt --batch 8 --out policy.json --json report.json

    batchmaker learn saved/parser --data requests.jsonl --batch 16 --out policy.json

    batchmaker serve treelstm-2type --policy learned:file=policy.json
    """
    options.check_picture(png)
    written = _check(encoding, (out, json))
    graphs = read_graphs(model, data, batch, train_data=train_data, words=words, seed=seed)
    model = saved_name(model)
    samples = Samples(graphs.to_learn, batch, seed)
    settings = [
        Settings(
            encoding=name, episodes=episodes, learners=learners, steps=steps, rate=rate, bootstrap=bootstrap, seed=seed
        )
        for name in ENCODINGS
    ]
    learnt = _learn_all(samples, settings)
    standings = compare(graphs.counted, {name: result.table for name, result in learnt.items()})
    _write(out, model, graphs, learnt[written], batch)
    under = f"{graphs.learnt_from}; batch {batch}; {len(samples.held_out)} mini-batches held out; seed {seed}"
    picture = png or out.with_suffix(".png")
    title = f"Learning the order of {model}'s batches"
    options.draw_if_possible(picture, lambda: draw_panels(picture, _panels(list(learnt.values())), title, under))
    _show(model, batch, graphs, standings, learnt)
    if json is not None:
        options.write_json(json, [_row(standing, batch) for standing in standings])


def _check(encoding: str, outputs: Iterable[Path | None]) -> Encoding:
    """Return the encoding of this name. OptionError if it is unknown, DataError for an unusable output path."""
    for path in outputs:
        options.check_writable(path)
    if encoding not in ENCODINGS:
        raise unknown_name("encoding", encoding, ENCODINGS)
    return encoding


def _learn_all(samples: Samples, settings: Sequence[Settings]) -> dict[Encoding, Learnt]:
    """Learn one table for each encoding, and show how far that is."""
    console = options.err()
    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} episodes"),
        TextColumn("{task.fields[ratio]}"), TimeElapsedColumn(),
    )  # fmt: skip
    learnt: dict[Encoding, Learnt] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        for each in settings:
            total = each.learners * each.episodes
            task = progress.add_task(f"e_{each.encoding}", total=total, ratio="")

            def show(episode: int, ratio: float, task: Any = task) -> None:
                progress.update(task, completed=episode, ratio=f"{ratio:.3f} x lower bound")

            learnt[each.encoding] = learn_table(samples, each, show)
            progress.update(task, completed=total)
    return learnt


def _write(out: Path, model: str, graphs: Graphs, learnt: Learnt, batch: int) -> None:
    settings = learnt.settings
    record = LearntFrom(
        data=graphs.learnt_from,
        requests=len(graphs.to_learn),
        batch=batch,
        learners=settings.learners,
        episodes=settings.episodes,
        steps=settings.steps,
        seed=settings.seed,
        ratio=round(learnt.ratio, 4),
        seconds=round(learnt.seconds, 2),
        program=commit(),
    )
    cells = tuple(map(CellRow.of, graphs.cells))
    PolicyFile(model, settings.encoding, cells, learnt.table, record).write(out)


def _panels(learnt: Sequence[Learnt]) -> list[Panel]:
    """Return the roll-outs of each encoding, learner after learner, and the best of them so far."""
    played, best = [], []
    for each in learnt:
        name = f"e_{each.settings.encoding}"
        at = [each.settings.episodes * out.learner + out.episode for out in each.curve]
        ratios = [out.ratio for out in each.curve]
        lowest = [min(ratios[: i + 1]) for i in range(len(ratios))]
        played.append(Line(name, at, ratios, ratios, ratios))
        best.append(Line(name, at, lowest, lowest, lowest))
    y = "batches / lower bound"
    return [
        Panel("Roll-outs on held-out mini-batches", "episodes", y, played),
        Panel("The best so far, which is kept", "episodes", y, best),
    ]


def _show(
    model: str, batch: int, graphs: Graphs, standings: Sequence[Standing], learnt: dict[Encoding, Learnt]
) -> None:
    table = Table(title=f"{model}, batch {batch}: means over {len(graphs.counted)} mini-batches", title_style="bold")
    table.add_column("policy")
    for name in ("batches", "lower bound", "over it", "us per decision", "states", "s to learn"):
        table.add_column(name, justify="right", no_wrap=True)
    fewest = min(standing.mean_batches for standing in standings)
    for standing in standings:
        result = next((each for name, each in learnt.items() if standing.policy == f"e_{name}"), None)
        more = ("", "") if result is None else (str(len(result.table)), f"{result.seconds:.2f}")
        table.add_row(
            standing.policy,
            f"{standing.mean_batches:.1f}",
            f"{standing.lower_bound:.1f}",
            f"{standing.mean_batches / standing.lower_bound - 1:.1%}",
            f"{standing.decision_us:.2f}",
            *more,
            style="bold green" if standing.mean_batches == fewest else "",
        )
    console = options.out()
    console.print(table)
    console.print(f"counted: {graphs.counted_from}; learnt from: {graphs.learnt_from}", highlight=False)


def _row(standing: Standing, batch: int) -> dict[str, Any]:
    row = asdict(standing)
    return {"policy": row.pop("policy"), "batch": batch, **row}
