"""Every figure and table of the five papers beside what came out here: makes papers/docs/evidence.md from the results.

    python benchmarks/evidence.py            # writes the page; measures nothing
    python benchmarks/evidence.py --check    # exit status 1 where the page or the list of older results is wrong
    python benchmarks/evidence.py --stale    # the commands whose results are of other code than what is here

A result says which code it measures, by a digest of it (`provenance.py`, decision 26). One of other code is refused
unless `runs.py` lists it as older; then the page says so.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from pages import fill, table
from provenance import RESULTS, ROOT, digest, is_current, result_path
from runs import OLDER, RUNS, Run

sys.path.append(str(ROOT / "papers" / "benchmarks"))  # the papers' figures, and the scripts whose probes are played

from paper_figures import batchmaker, ed_batch, grnn, late_batching, lazybatching
from paper_figures.entry import ABSENT, Figure

PAGE: Final = ROOT / "papers" / "docs" / "evidence.md"
PAPERS: Final = (batchmaker, late_batching, lazybatching, ed_batch, grnn)
WANTED: Final[dict[str, dict[str, int]]] = {
    "batchmaker": {"Figure": 15}, "late_batching": {"Figure": 7}, "lazybatching": {"Figure": 17, "Table": 2},
    "ed_batch": {"Figure": 10, "Table": 5}, "grnn": {"Figure": 15, "Table": 3},
}  # fmt: skip
"""How many figures and tables each paper has."""
ROMAN: Final = {"I": 1, "II": 2}


# --- what results are of ---------------------------------------------------------------------------------------------


@cache
def _probe_now(script: str, function: str) -> str:
    found: Callable[[], str] = getattr(importlib.import_module(script), function)
    return found()


def read(name: str) -> Any:
    """Return a result file's content, None if it has not been made."""
    try:
        return json.loads(result_path(name).read_text("utf-8"))
    except FileNotFoundError:
        return None


def current(run: Run, name: str) -> bool | None:
    """Return whether a result is of the code that is here; None if it does not say, or has not been made.

    A simulation of changed code is current too if a little of it, played again, comes out the same. A file that cannot
    say (a profile of costs) is as current as the result of the same run that has it among what it measures.
    """
    found = read(name)
    if isinstance(found, dict) and "measures" not in found:
        for other in run.results:
            about = read(other) if other != name else None
            paths = about.get("measures", {}).get("paths", ()) if isinstance(about, dict) else ()
            if any(path.endswith(f"/results/{name}") for path in paths):
                return current(run, other)
    is_so = None if found is None else is_current(found)
    if is_so is False and run.probe and "probe" in found["measures"] and name not in OLDER:
        about = found["measures"]
        return digest(about["paths"]) == about.get("played_again") or about["probe"] == _probe_of(run)
    return is_so


def _probe_of(run: Run) -> str:
    return _probe_now(run.name.replace("-", "_"), run.probe)


def note_probes() -> None:
    """Write into each result that other code has measured, and that comes out the same with this, the digest of this:
    playing it again takes minutes, and is done once for each state of the code."""
    for run in RUNS.values():
        for name in run.results if run.probe else ():
            if current(run, name) and not is_current(found := read(name)):
                path, about = result_path(name), found["measures"]
                text = path.read_text("utf-8")
                text = re.sub(r',\s*"played_again": "\w+"', "", text)
                noted = f'"probe": "{about["probe"]}", "played_again": "{digest(about["paths"])}"'
                path.write_text(text.replace(f'"probe": "{about["probe"]}"', noted), "utf-8")


def problems() -> list[str]:
    """Return what is wrong with the lists of runs and of older results, and what to do; nothing if all is well."""
    known = {name for run in RUNS.values() for name in run.results}
    files = {path.name for folder in RESULTS for path in folder.glob("*.json")}
    said = [f"{name}: no run of runs.py makes it; add one" for name in sorted(files - known)]
    for run in RUNS.values():
        for name in run.results:
            if name not in files:
                continue
            is_so = current(run, name)
            if isinstance(found := read(name), dict) and found.get("quick"):
                said.append(f"{name} is of a quick run, whose figures mean nothing; measure it (`{run.command}`)")
            if not is_so and name not in OLDER:
                said.append(f"{name} was measured with other code than this; run it again (`{run.command}`), or list "
                            "it in OLDER")  # fmt: skip
            if is_so and name in OLDER:
                said.append(f"{name} is of this code; take it out of OLDER in runs.py")
    return said


# --- the page --------------------------------------------------------------------------------------------------------


def numbers_of(item: str) -> set[tuple[str, int]]:
    """Return what an item stands for: `Figures 1, 4 to 6` is ("Figure", 1), ("Figure", 4), and so on to 6."""
    found: set[tuple[str, int]] = set()
    for kind, listed in re.findall(r"(Figure|Table)s? ((?:\d+|I+)(?: \([ab]\))?(?:(?:, | to )(?:\d+|I+)\b)*)", item):
        for part in re.sub(r" \([ab]\)", "", listed).split(", "):
            ends = [ROMAN.get(end) or int(end) for end in part.split(" to ")]
            found |= {(kind, value) for value in range(ends[0], ends[-1] + 1)}
    return found


def missing(name: str, figures: Sequence[Figure]) -> set[tuple[str, int]]:
    """Return the figures and tables of a paper that its list does not have."""
    wanted = {(kind, value) for kind, most in WANTED[name].items() for value in range(1, most + 1)}
    return wanted - {each for figure in figures for each in numbers_of(figure.item)}


def state_now(figure: Figure) -> str:
    """Return a figure's state; what nobody has measured is not reproduced, whatever it is meant to be."""
    return "not reproduced" if figure.our_number() == ABSENT else figure.state


def paper_section(title: str, figures: Sequence[Figure]) -> str:
    """Return a paper's table, and why its numbers and ours differ."""
    rows = []
    for figure in figures:
        drawn = figure.picture and (PAGE.parent / "images" / figure.picture).exists()
        link = f"[picture]({os.path.normpath(f'images/{figure.picture}')})" if drawn else ""
        made = f"[{figure.run}](#commands)" if figure.run else figure.where
        rows.append(
            [f"**{figure.item}**: {figure.shows}", figure.theirs, figure.our_number(), figure.state, made, link]
        )
    reasons = [f"- **{figure.item}**: {figure.why.strip()}" for figure in figures if figure.why]
    heads = ("figure", "the paper", "here", "state", "made by", "")
    lines = [f"| {' | '.join(row)} |" for row in (heads, ("---",) * len(heads), *rows)]
    return "\n\n".join((f"### {title}", "\n".join(lines), "Why they differ, and what is missing:", "\n".join(reasons)))


def state_of(run: Run) -> str:
    """Return whether the results of a run are of the code that is here, in words."""
    states = {name: current(run, name) for name in run.results}
    made = [name for name in run.results if read(name) is not None]
    if not made:
        return "**not measured yet**"
    if all(states[name] for name in made):
        return "this code"
    return "**from an older commit**"


def commands_table() -> str:
    """Return a row for each run: its command, files, where and when it was measured, and of which code."""
    rows = []
    for run in RUNS.values():
        found = next((content for name in run.results if (content := read(name)) is not None), None)
        facts = found[0] if isinstance(found, list) else found or {}
        inner = facts.get("results")
        about = inner[0] if isinstance(inner, list) and inner and "commit" not in facts else facts
        about = facts["lines"][-1] | {"machine": facts.get("machine", {})} if "lines" in facts else about
        machine = (about.get("machine") or facts.get("machine") or {}).get("cpu", "")
        load = facts.get("load_average")
        load_text = (
            "" if load is None else ", load " + (" to ".join(map(str, load)) if isinstance(load, list) else str(load))
        )
        files = ", ".join(
            f"[{name}]({os.path.relpath(result_path(name), PAGE.parent)})"
            for name in run.results
            if read(name) is not None
        )
        page = f"[page]({run.page})" if run.page else ""
        where = f"{machine}{load_text}, commit {about.get('commit', '?')}" if facts else ""
        rows.append([run.name, f"`{run.command}`", str(run.minutes), files, where, state_of(run), page])
    listed = table(("run", "command", "minutes", "results", "measured on", "of", ""), rows)
    return f"{listed}\n\n{minutes_text()}"


def minutes_text() -> str:
    """Return how long the commands take: all of them, and those whose numbers stand in the papers' tables."""
    used = {figure.run for paper in PAPERS for figure in paper.FIGURES if figure.run}
    figures = sum(run.minutes for run in RUNS.values() if run.name in used - {"gpu"})
    every = sum(run.minutes for run in RUNS.values())
    return (
        f"One after the other, the commands behind the papers' figures and tables take {figures} minutes on the CPU "
        f"side, not the hour that is wanted, and all commands {every}: where times count, nothing else may run."
    )


def summary() -> str:
    """Return how many figures of each paper are in which state."""
    states = ("reproduced", "in part", "other outcome", "not reproduced", "explanation")
    rows = []
    for paper in PAPERS:
        figures: tuple[Figure, ...] = paper.FIGURES
        counts = [sum(state_now(figure) == state for figure in figures) for state in states]
        rows.append([paper.TITLE.partition(":")[0], *map(str, counts)])
    return table(("paper", *states), rows)


def sections() -> dict[str, str]:
    """Return what stands between the page's markers."""
    papers = "\n\n".join(paper_section(paper.TITLE, paper.FIGURES) for paper in PAPERS)
    return {"summary": summary(), "papers": papers, "commands": commands_table()}


def is_fresh(page: Path) -> bool:
    """Return whether the page is what would be written now."""
    text = page.read_text("utf-8")
    return all(f"<!-- {name} -->\n{body}\n<!-- /{name} -->" in text for name, body in sections().items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--stale", action="store_true")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    if options.stale:
        for run in RUNS.values():
            if state_of(run) != "this code":
                print(f"{run.command}  # {', '.join(run.results)}")
        return
    if options.check:
        wrong = problems() + ([] if is_fresh(options.page) else [f"{options.page}: make it again with evidence.py"])
        print("\n".join(wrong))
        sys.exit(bool(wrong))
    note_probes()
    fill(options.page, sections())


if __name__ == "__main__":
    main()
