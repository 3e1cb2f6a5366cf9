"""`batchmaker serve` with a fleet, as a process whose replicas are servers in its threads and not on Ray."""

from __future__ import annotations

from fleets_in_process import ThreadLauncher

from batchmaker.cli.main import main
from batchmaker.fleet import on_ray
from batchmaker.fleet.server import serve_fleet


def serve_in_threads(config, on_ready, read):
    return serve_fleet(config, ThreadLauncher(), on_ready, read)


if __name__ == "__main__":
    on_ray.serve_on_ray = serve_in_threads
    main()
