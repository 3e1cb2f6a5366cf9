"""`--replicas auto` on a Ray node: as many replicas as there is memory for, where there are cores for more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fleets_in_process import fleet_config
from test_ray_fleet import LiveFleet

from batchmaker.fleet.on_ray import RayLauncher
from batchmaker.server.config import FleetConfig

ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("default")]

MEMORY = 1400 << 20


@pytest.fixture
def node(models_in_reach: None) -> Iterator[Any]:
    ray.init(num_cpus=16, _memory=MEMORY, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


def test_as_many_replicas_are_started_as_there_is_memory_for(node, models):
    fleet = LiveFleet(fleet_config(models[0] / "counter", fleet=FleetConfig(replicas="auto")))
    try:
        launcher = fleet.launcher
        assert isinstance(launcher, RayLauncher)
        room = fleet.call(launcher.room(fleet.server.fleet.config))
        assert 2 <= room < 16, "a replica takes more than 1400 MB / 16, and less than half of it"
        assert len(fleet.open_numbers()) == room
        assert fleet.generate("counter", 3).json()["output_0"] == [1, 2, 3]
    finally:
        fleet.close()


def test_where_memory_is_plenty_cores_decide(models_in_reach, models):
    ray.init(num_cpus=3, _memory=64 << 30, include_dashboard=False, log_to_driver=False)
    try:
        fleet = LiveFleet(fleet_config(models[0] / "counter", fleet=FleetConfig(replicas="auto")))
        try:
            assert len(fleet.open_numbers()) == 3
        finally:
            fleet.close()
    finally:
        ray.shutdown()
