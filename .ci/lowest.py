"""Print the lowest version of each dependency that pyproject.toml allows, as constraints for pip.

Usage: python3 .ci/lowest.py pyproject.toml
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["project"]
for wanted in project["dependencies"] + project["optional-dependencies"]["client"]:
    name, lowest = re.match(r"([\w.-]+)(?:\[.*\])?>=([\w.]+)", wanted).groups()
    print(f"{name}=={lowest}")
