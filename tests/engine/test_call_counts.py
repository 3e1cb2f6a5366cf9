"""How many of the package's own Python functions a request calls. Counted, not timed: a count is the same everywhere.

Each count is the least of some: a slow machine needs more turns of the engine for the same requests, never fewer.
"""

from __future__ import annotations

import hot_path

CALLS = {
    "one request alone": 133,
    "each further one in `map` of 256": 3,
    "each further one in `submit_many` of 256": 6,
}
CALLS_OF_CHUNKS = {"one chunk alone": 280, "each further chunk among those of 50 streams": 8}


def test_requests() -> None:
    for name, _, each in hot_path.requests():
        assert each <= CALLS[name], name


def test_chunks() -> None:
    for name, _, each in hot_path.chunks():
        assert each <= CALLS_OF_CHUNKS[name], name
