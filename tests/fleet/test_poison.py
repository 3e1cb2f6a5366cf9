"""A request that ends the process that computes it ends one replica, and no other one is given it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from fleets_in_process import RunningFleet, fleet_config
from served_models import Ending
from server_process import RunningServer

import batchmaker as bm
from batchmaker.fleet.server import FleetServer
from batchmaker.server.config import Config, FleetConfig


class ProcessReplica:
    """A replica in a process of its own: Running."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.http, self.grpc = (server.host, server.port), None

    async def ended(self) -> None:
        await asyncio.to_thread(self.server.process.wait)

    async def stop(self) -> None:
        await asyncio.to_thread(self.server.close)

    def kill(self) -> None:
        self.server.process.kill()


class ProcessLauncher:
    """Starts them: FleetLauncher. enough: how many are started; later ones never come."""

    def __init__(self, folder: Path, model: Path, enough: int) -> None:
        self.keys: dict[str, str] = {}
        self.started: list[ProcessReplica] = []
        self._folder, self._model, self._enough = folder, model, enough
        self._one = asyncio.Lock()

    async def launch(self, number: int, config: Config) -> ProcessReplica:
        if number >= self._enough:
            await asyncio.Event().wait()
        async with self._one:  # the environment is the process's
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("BATCHMAKER_API_KEYS", ",".join(f"{name}:{key}" for name, key in self.keys.items()))
                log = self._folder / f"{number}.log"
                server = await asyncio.to_thread(RunningServer, (os.fspath(self._model),), log)
        self.started.append(ProcessReplica(server))
        return self.started[-1]

    async def room(self, config: Config) -> int:
        return self._enough


@pytest.mark.slow
def test_one_poison_request_does_not_end_two_replicas(tmp_path):
    bm.save(Ending(), tmp_path / "ending")

    async def scenario():
        launcher = ProcessLauncher(tmp_path, tmp_path / "ending", enough=3)
        server = FleetServer(fleet_config(tmp_path / "ending", fleet=FleetConfig(replicas=3)), launcher)
        fleet = RunningFleet(server, launcher, await server.start())
        try:
            good = await asyncio.gather(*(fleet.generate("ending", 3) for _ in range(9)))
            assert {answer.status_code for answer in good} == {200}
            poison = await fleet.generate("ending", 13)
            assert (poison.status_code, "retry-after" in poison.headers) == (503, False)
            assert "which may be the cause" in poison.json()["error"]
            await fleet.wait_for(lambda: len(server.balancer.replicas) == 2)
            later = await asyncio.gather(*(fleet.generate("ending", 3) for _ in range(20)))
            assert {answer.status_code for answer in later} == {200}
            ended = [replica.server.process.poll() for replica in launcher.started]
            assert sorted(ended, key=str) == [13, None, None]
            assert server.front.num_retried == 0
        finally:
            await fleet.client.aclose()
            await server.stop()
            for replica in launcher.started:
                replica.server.close()

    asyncio.run(scenario())
