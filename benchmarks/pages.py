"""What every script that writes a page of results needs: tables in Markdown, and their places in the page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, texts: int = 1) -> str:
    """Return a table in Markdown; all columns but the first `texts` have their numbers to the right."""
    lines = [head, [*["---"] * texts, *["---:"] * (len(head) - texts)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float) -> str:
    """Return a number in three digits, whole from 100 on."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def fill(page: Path, sections: dict[str, str]) -> None:
    """Put each section between its markers. ValueError if the page has no place for one."""
    text = page.read_text("utf-8")
    for name, body in sections.items():
        pattern = re.compile(f"(<!-- {re.escape(name)} -->\n).*?(<!-- /{re.escape(name)} -->)", re.DOTALL)
        text, times = pattern.subn(lambda found, body=body: f"{found[1]}{body}\n{found[2]}", text)
        if times != 1:
            raise ValueError(f"{page}: expected one place <!-- {name} --> ... <!-- /{name} -->, found {times}")
    page.write_text(text, "utf-8")
