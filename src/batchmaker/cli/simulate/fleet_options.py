"""Options of `batchmaker simulate` that are for fleets."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Annotated, Final, final

import typer

from batchmaker.errors import OptionError, unknown_name
from batchmaker.fleet.routing import RULES
from batchmaker.fleet.scaling import ScalingRule

_FLEET: Final = "Fleets"
DEFAULT_ROUTERS: Final = ("round-robin", "two-choices", "least-requests", "least-work")
FIDELITIES: Final = ("exact", "fast")
MOST_EXACT_REPLICAS: Final = 16
MOST_EXACT_REQUESTS: Final = 20_000
"""Up to these a fleet is simulated exactly where nothing else is asked for: that is half a minute."""


@final
@dataclass(frozen=True, slots=True)
class FleetAsk:
    """What is asked for of fleets, as the options say it. OptionError for what makes no sense."""

    replicas: Annotated[
        list[int] | None,
        typer.Option(
            min=1, rich_help_panel=_FLEET, help="Simulate so many engines behind a router. Repeat for several."
        ),
    ] = None
    router: Annotated[
        list[str] | None, typer.Option(rich_help_panel=_FLEET, help=f"Repeat for several: {', '.join(RULES)}.")
    ] = None
    fidelity: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_FLEET,
            help="exact: the engine's own scheduler in each replica. fast: its compiled calls alone, for models whose "
            f"requests are one chain of one cell. Default: exact up to {MOST_EXACT_REPLICAS} replicas and "
            f"{MOST_EXACT_REQUESTS} requests, or where fast cannot be.",
        ),
    ] = None
    autoscale: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_FLEET,
            help="work:target=S keeps S seconds of queued work on a replica, sequences:target=N so many open "
            "sequences. Further: least=1,most=1000,every_s=1,cool_s=60.",
        ),
    ] = None
    start_s: Annotated[
        float,
        typer.Option(min=0, rich_help_panel=_FLEET, help="Seconds from asking for a replica to its first request."),
    ] = 0.0
    mean_life_s: Annotated[
        float | None,
        typer.Option(rich_help_panel=_FLEET, help="Replicas die, after so many seconds on average. Default: never."),
    ] = None
    chunks: Annotated[
        float | None,
        typer.Option(
            min=1,
            rich_help_panel=_FLEET,
            help="Requests are chunks of sequences, so many in one on average; for --router sticky.",
        ),
    ] = None
    chunk_gap_ms: Annotated[
        float, typer.Option(min=0, rich_help_panel=_FLEET, help="Milliseconds between the chunks of a sequence.")
    ] = 100.0
    length_error: Annotated[
        float,
        typer.Option(
            min=0,
            rich_help_panel=_FLEET,
            help="The router's guess of a request's work is off by a factor exp(E z), z normal.",
        ),
    ] = 0.0

    def check(self) -> None:
        """Raise OptionError unless everything is in range and fits together."""
        if not self.replicas:
            wrong = next((f.name for f in fields(self) if getattr(self, f.name) not in (f.default, [])), None)
            if wrong is not None:
                flag = wrong.replace("_", "-")
                raise OptionError(f"--{flag} is for a fleet; say of how many engines with --replicas N")
            return
        routers = self.router or []
        for router in routers:
            if router not in RULES:
                raise unknown_name("router", router, tuple(RULES))
        for flag, values in (("--replicas", self.sizes), ("--router", routers)):
            if len(set(values)) < len(values):
                raise OptionError(f"{flag}: the same value is given twice among {', '.join(map(str, values))}")
        if self.fidelity is not None and self.fidelity not in FIDELITIES:
            raise unknown_name("fidelity", self.fidelity, FIDELITIES)
        if self.mean_life_s is not None and not self.mean_life_s > 0:
            raise OptionError(f"--mean-life-s must be above 0, got {self.mean_life_s:g}")
        if not math.isfinite(self.length_error):
            raise OptionError(f"--length-error must be finite, got {self.length_error}")
        self._check_sequences()

    def _check_sequences(self) -> None:
        wrong = [router for router in self.all_routers if (router == "sticky") != (self.chunks is not None)]
        if wrong and self.chunks is None:
            raise OptionError("--router sticky is for sequences; say how many chunks one has with --chunks N")
        if wrong:
            raise OptionError(
                f"--chunks: the state of a sequence is on one replica; --router {wrong[0]} would leave it"
            )
        if self.rule is not None and self.rule.measure == "sequences" and self.chunks is None:
            raise OptionError("--autoscale sequences: there are none; say how many chunks one has with --chunks N")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of replicas to simulate."""
        return tuple(self.replicas or ())

    @property
    def all_routers(self) -> tuple[str, ...]:
        """The routers to simulate."""
        return tuple(self.router or (DEFAULT_ROUTERS if self.chunks is None else ("sticky",)))

    @property
    def rule(self) -> ScalingRule | None:
        """The rule of scaling, None without one."""
        return None if self.autoscale is None else ScalingRule.read(self.autoscale)
