"""A fleet of one replica behind Ray Serve's own HTTP proxy: python fleet_app.py MODEL PORT.

With RAY_SERVE_ENABLE_HA_PROXY=1 in the environment the proxy is HAProxy (pip install 'ray[serve,haproxy]').
"""

from __future__ import annotations

import sys
import time

import ray
from ray import serve

from batchmaker.fleet import application


def main() -> None:
    model, port = sys.argv[1], int(sys.argv[2])
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(application({"models": model, "replicas": 1}), name="batchmaker")
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main()
