"""How many replicas a fleet should have, by what it has to do. Without I/O: numbers in, a number out."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, fields
from typing import Final, final

from batchmaker.errors import OptionError, unknown_name

MEASURES: Final = ("work", "sequences")
"""What a rule looks at: seconds of unanswered work, or open sequences."""

MOST_SHRUNK: Final = 0.05
"""Share of the replicas that go at one look, or one replica. Work that waits grows much faster than load, so what is
enough falls far below what is needed as soon as a fleet is larger than it must be."""


@final
@dataclass(frozen=True, slots=True)
class ScalingRule:
    """Keep `target` of a measure on each replica.

    measure: one of MEASURES. target: seconds of unanswered work per replica, or open sequences per replica. least,
    most: replicas. every_s: how often it looks. cool_s: the fleet shrinks only to what was enough for so long, and
    little by little (MOST_SHRUNK); it grows at once. Written as in `work:target=0.05,least=2,most=40,cool_s=60`.
    """

    measure: str
    target: float
    least: int = 1
    most: int = 1000
    every_s: float = 1.0
    cool_s: float = 60.0

    def __post_init__(self) -> None:
        if self.measure not in MEASURES:
            raise unknown_name("measure of scaling", self.measure, MEASURES)
        for name in ("target", "every_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise OptionError(f"scaling by {self.measure}: {name} must be a finite number above 0, got {value:g}")
        if not (math.isfinite(self.cool_s) and self.cool_s >= 0):
            raise OptionError(f"scaling by {self.measure}: cool_s must be at least 0, got {self.cool_s:g}")
        if not 1 <= self.least <= self.most:
            raise OptionError(
                f"scaling by {self.measure}: expected 1 <= least <= most, got least={self.least} and most={self.most}"
            )

    @classmethod
    def read(cls, text: str) -> ScalingRule:
        """Return the rule that a text says. OptionError names what is not known, wrong or missing."""
        measure, _, options = text.partition(":")
        types = {field.name: int if field.name in ("least", "most") else float for field in fields(cls)[1:]}
        values: dict[str, float] = {}
        for option in filter(None, options.split(",")):
            name, _, value = option.partition("=")
            if name not in types:
                raise unknown_name(f"option of scaling by {measure}", name, tuple(types))
            try:
                values[name] = types[name](value)
            except ValueError:
                raise OptionError(f"scaling by {measure}: {name} must be a number, got {value!r}") from None
        if measure in MEASURES and "target" not in values:
            raise OptionError(f"scaling by {measure} needs a target, for example {measure}:target=0.05")
        return cls(measure, values.pop("target", 1.0), **values)  # type: ignore[arg-type]


@final
class Autoscaler:
    """Says how many replicas there should be, each time that it is told what there is to do.

    replicas: that there are at first, taken to have been enough so far.
    """

    __slots__ = ("_rule", "_seen", "_wanted")

    def __init__(self, rule: ScalingRule, replicas: int = 1) -> None:
        self._rule = rule
        self._wanted = replicas
        self._seen: deque[tuple[float, int]] = deque()  # what was enough when, within cool_s; numbers go down

    def wanted(self, now_s: float, measured: float) -> int:
        """Return the number of replicas. now_s: ascending. measured: of the whole fleet, in the rule's measure."""
        rule, seen = self._rule, self._seen
        enough = min(max(math.ceil(measured / rule.target), rule.least), rule.most)
        if not seen:
            seen.append((now_s, self._wanted))
        while seen and seen[-1][1] <= enough:
            seen.pop()
        seen.append((now_s, enough))
        while seen[0][0] < now_s - rule.cool_s:
            seen.popleft()
        least = self._wanted - max(1, int(self._wanted * MOST_SHRUNK))
        self._wanted = max(seen[0][1], min(least, self._wanted))
        return self._wanted
