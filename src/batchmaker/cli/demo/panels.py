"""The live display of the demo: one panel per policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.columns import Columns
from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from batchmaker.cli.bench.load import Journal
from batchmaker.cli.bench.statistics import Percentiles, percentiles
from batchmaker.engine.engine import Engine
from batchmaker.engine.timeline import Timeline

COLOURS = ("red", "green", "yellow", "blue", "magenta", "cyan", "bright_red", "bright_green", "bright_blue")
PANEL_WIDTH = 56
RECENT = 2000
"""Live percentiles are over so many last answers."""


@dataclass(slots=True)
class Side:
    """One policy's panel: not begun, running or done."""

    name: str
    timeline: Timeline = field(default_factory=Timeline)
    engine: Engine | None = None
    journal: Journal | None = None
    share: float = 0.0
    seconds: float = 0.0
    max_batch: int = 64

    @property
    def begin_s(self) -> float:
        """The start of the first step, in its engine's time. Arrivals after it are the same for both policies."""
        return self.timeline.steps[0].begin_s if self.timeline.steps else 0.0

    def watch(self, journal: Journal) -> None:
        """Use the journal of the run that begins."""
        self.journal = journal
        journal.see_steps(self.timeline.add)

    def latency(self) -> Percentiles:
        tickets = [] if self.journal is None else self.journal.tickets[-RECENT:]
        return percentiles([finished - arrived for arrived, _, finished, _ in tickets])

    def panel(self) -> Panel:
        """Return the panel for the present state."""
        if self.journal is None or self.engine is None:
            return Panel(Text("waiting", style="dim"), title=self.name, width=PANEL_WIDTH, border_style="dim")
        stats, latency = self.engine.stats, self.latency()
        answered = len(self.journal.tickets)
        steps = self.timeline.steps
        rows = [request for request in steps[-1].requests if request is not None] if steps else []
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column(justify="right")
        table.add_column(style="dim")
        table.add_column(justify="right")
        elapsed_s = max(1e-9, self.share * self.seconds)
        table.add_row("in flight", str(self.engine.num_in_flight), "p50", _ms(latency.p50_ms))
        table.add_row("answered", str(answered), "p90", _ms(latency.p90_ms))
        table.add_row("a second", f"{answered / elapsed_s:.0f}", "p99", _ms(latency.p99_ms))
        table.add_row("mean batch", f"{self.timeline.mean_batch():.1f}", "steps", str(stats.steps))
        bar = ProgressBar(total=1.0, completed=self.share, width=PANEL_WIDTH - 6)
        return Panel(
            Group(table, Text("rows of the last batch, a colour per request", style="dim"), _rows(rows), bar),
            title=f"[bold]{self.name}[/bold]",
            width=PANEL_WIDTH,
            border_style="green" if self.share >= 1 else "cyan",
        )


def side_by_side(sides: list[Side]) -> Columns:
    """Return all panels, next to each other if the terminal is wide enough."""
    return Columns([side.panel() for side in sides])


def _rows(requests: Sequence[int]) -> Text:
    """Return one block per row; a request has the same colour in every row."""
    text = Text()
    for row in range(2 * (PANEL_WIDTH - 6)):
        if row and row % (PANEL_WIDTH - 6) == 0:
            text.append("\n")
        if row < len(requests):
            text.append("█", style=COLOURS[requests[row] % len(COLOURS)])
        else:
            text.append("·", style="dim")
    return text


def _ms(value: float) -> str:
    return "-" if value != value else f"{value:,.0f} ms"
