"""Print the README's test command, so that what CI runs and what people are told to run are one text.

Usage: python3 .ci/readme_command.py README.md
The command is the only ```bash block that both makes a virtual environment and runs pytest.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

BASH_BLOCK = re.compile(r"^```bash[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
MARKS = ("-m venv", "-m pytest")


def command_in(readme: str) -> str:
    """Return the test command of a README's text, without the blank lines around it.

    Raises ValueError unless exactly one block qualifies.
    """
    blocks: list[str] = BASH_BLOCK.findall(readme)
    commands = [block.strip() for block in blocks if all(mark in block for mark in MARKS)]
    if len(commands) != 1:
        wanted = " and ".join(f"'{mark}'" for mark in MARKS)
        raise ValueError(
            f"found {len(commands)} of {len(blocks)} bash blocks with {wanted}, expected exactly one. "
            "Fence the test command as ```bash, and nothing else that holds both."
        )
    return commands[0]


if __name__ == "__main__":
    path = Path(sys.argv[1])
    try:
        print(command_in(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        sys.exit(f"{path}: {error}")
