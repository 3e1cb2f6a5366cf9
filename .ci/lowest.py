"""Print the lowest version of each dependency that pyproject.toml allows, as constraints for pip.

Those of the package and of the extras that a user's process imports; not of Ray and of CUDA, which bring whole systems.

Usage: python3 .ci/lowest.py pyproject.toml
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

EXTRAS = ("client", "grpc", "onnx", "plots", "server")

project = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["project"]
wanted = [*project["dependencies"], *(one for extra in EXTRAS for one in project["optional-dependencies"][extra])]
for one in dict.fromkeys(wanted):
    name, lowest = re.match(r"([\w.-]+)(?:\[.*\])?>=([\w.]+)", one).groups()
    print(f"{name}=={lowest}")
