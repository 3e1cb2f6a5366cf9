"""Fleets on a Ray cluster of three nodes: nothing is lost silently while replicas and nodes go."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import tritonclient.http as triton
from fleets_in_process import fleet_config
from served_models import Counter, Scales
from triton_calls import LIMIT_S, ask, ask_in_a_stream

import batchmaker as bm
from batchmaker.fleet.on_ray import launcher_for
from batchmaker.fleet.server import FleetServer
from batchmaker.server.config import Config, FleetConfig
from waiting import wait_until

ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("default")]


class LiveFleet:
    """A fleet in a thread of its own, so that a test may wait."""

    def __init__(self, config: Config) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.server: FleetServer = self.call(self._made(config))
        self.addresses = self.call(self.server.start())
        self.http = self.addresses[0].removeprefix("http://")

    async def _made(self, config: Config) -> FleetServer:
        self.launcher = launcher_for(config, ray)
        return FleetServer(config, self.launcher)

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(4 * LIMIT_S)

    def open_numbers(self) -> list[int]:
        return [n for n, one in list(self.server.balancer.replicas.items()) if one.state == "open"]

    def wait_for(self, holds: Callable[[], bool]) -> None:
        wait_until(holds, 2 * LIMIT_S)

    def generate(self, model: str, given: object, **parameters: object) -> httpx.Response:
        body = {"input_0": given, "parameters": parameters}
        return httpx.post(f"{self.addresses[0]}/v2/models/{model}/generate", json=body, timeout=LIMIT_S)

    def close(self) -> None:
        self.call(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Load:
    """Clients that ask one request after the other, and note every outcome."""

    def __init__(self, fleet: LiveFleet, clients: int = 4) -> None:
        self.outcomes: list[str] = []
        self._fleet = fleet
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(clients)]

    def _ask(self) -> None:
        client = triton.InferenceServerClient(self._fleet.http, network_timeout=LIMIT_S, connection_timeout=LIMIT_S)
        given = triton.InferInput("input_0", [1], "INT64")
        given.set_data_from_numpy(np.array([40]))
        while not self._over.is_set():
            try:
                answer = client.infer("counter", [given]).as_numpy("output_0")
                self.outcomes.append("answered" if list(answer) == list(range(1, 41)) else "wrong")
            except triton.InferenceServerException as error:
                self.outcomes.append(str(error))
        client.close()

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        self.more(20)
        return self

    def more(self, count: int = 100) -> None:
        """Wait for so many more outcomes."""
        wanted = len(self.outcomes) + count
        self._fleet.wait_for(lambda: len(self.outcomes) >= wanted)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), "a request was neither answered nor refused"


@pytest.fixture(scope="module")
def cluster(models_in_reach: None) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("models")
    bm.save(Counter(), folder / "counter")
    bm.save(Scales(), folder / "scales")
    return folder


@pytest.fixture
def fleet(cluster: Any, models: Any) -> Iterator[LiveFleet]:
    fleet = LiveFleet(fleet_config(models, grpc_port=0, fleet=FleetConfig(replicas=2)))
    yield fleet
    fleet.close()


async def killed(fleet: LiveFleet, number: int) -> None:
    """Ray ends the process of a replica, and nobody tells the fleet."""
    ray.kill(fleet.server.fleet.running(number).actor)


def test_tritonclient_works_unchanged(fleet):
    single, chunks = ask(fleet.addresses[1].removeprefix("grpc://"))
    assert (single, chunks) == ([n * n for n in range(6)], [1, 5, 14])
    ids, totals, parts = ask_in_a_stream(fleet.addresses[1].removeprefix("grpc://"))
    assert ids == [str(n) for n in range(20)]
    assert totals[::2] == [(n % 4) ** 2 for n in range(0, 20, 2)]
    assert len(parts) == 5
    sums = [fleet.generate("scales", [n], sequence_id=3, sequence_start=n == 1).json()["output_0"] for n in (1, 2, 3)]
    assert sums == [1, 5, 14]


def test_a_replica_killed_under_load_loses_nothing_silently(fleet):
    begun = [fleet.generate("scales", [2], sequence_id=n, sequence_start=True) for n in (1, 2)]
    assert [one.status_code for one in begun] == [200, 200]
    victim = fleet.open_numbers()[0]
    with Load(fleet) as load:
        fleet.call(killed(fleet, victim))
        load.more()
        fleet.wait_for(lambda: victim not in fleet.open_numbers() and len(fleet.open_numbers()) == 2)
        load.more()
    assert set(load.outcomes) == {"answered"}
    later = [fleet.generate("scales", [1], sequence_id=n) for n in (1, 2)]
    assert sorted(one.status_code for one in later) == [200, 400]
    assert sum("replica that held its state is gone" in one.text for one in later) == 1


def test_a_node_removed_under_load_loses_nothing_silently(fleet, cluster):
    nodes = {node.node_id: node for node in cluster.worker_nodes}
    at = {number: fleet.call(fleet.server.fleet.running(number).node()) for number in fleet.open_numbers()}
    victims = [number for number, node in at.items() if node in nodes]
    assert victims, "replicas are spread, and only one of three nodes is the head"
    with Load(fleet) as load:
        cluster.remove_node(nodes[at[victims[0]]], allow_graceful=False)
        load.more()
        fleet.wait_for(lambda: victims[0] not in fleet.open_numbers() and len(fleet.open_numbers()) == 2)
        load.more()
    cluster.add_node(num_cpus=2)
    assert set(load.outcomes) == {"answered"}


def test_a_rolling_update_under_load_fails_no_call(fleet):
    before = fleet.open_numbers()
    config = fleet.server.fleet.config
    with Load(fleet) as load:
        changed = msgspec.structs.replace(config, trace_steps=7, fleet=FleetConfig(replicas=2))
        fleet.call(fleet.server.update(changed))
        load.more()
    assert set(load.outcomes) == {"answered"}
    assert not set(before) & set(fleet.open_numbers())
    assert len(fleet.open_numbers()) == 2


def test_a_fleet_grows_to_three_and_shrinks_to_one_under_load(cluster, models):
    rule = "sequences:target=2,least=1,most=3,every_s=0.1,cool_s=1"
    fleet = LiveFleet(fleet_config(models, fleet=FleetConfig(autoscale=rule)))
    try:
        with Load(fleet, clients=2) as load:
            for n in range(1, 7):
                assert fleet.generate("scales", [1], sequence_id=n, sequence_start=True).status_code == 200
            fleet.wait_for(lambda: len(fleet.open_numbers()) == 3)
            ends = [fleet.generate("scales", [1], sequence_id=n, sequence_end=True) for n in range(1, 7)]
            assert [end.json()["output_0"] for end in ends] == [2] * 6
            fleet.wait_for(lambda: len(fleet.server.balancer.replicas) == 1)
            load.more()
        assert set(load.outcomes) == {"answered"}
    finally:
        fleet.close()


def test_serve_runs_the_application(cluster, models):
    from ray import serve

    from batchmaker.fleet import application

    serve.start(proxy_location="Disabled")
    try:
        handle = serve.run(application({"models": f"counter={models / 'counter'}", "replicas": "1"}), name="batchmaker")
        (address,) = handle.addresses.remote().result(timeout_s=LIMIT_S)
        answer = httpx.post(f"{address}/v2/models/counter/generate", json={"input_0": 3}, timeout=LIMIT_S)
        assert answer.json()["output_0"] == [1, 2, 3]
    finally:
        serve.shutdown()


def test_serve_deploys_a_written_file_and_updates_it(cluster, models, tmp_path):
    import yaml
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    from batchmaker.fleet.serve_application import write_application

    def deploy(config: Config) -> None:
        write_application(config, tmp_path / "fleet.yaml")
        content = yaml.safe_load((tmp_path / "fleet.yaml").read_text())
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(content), _blocking=True)

    def told() -> tuple[str, list[dict[str, Any]]]:
        (address,) = serve.get_app_handle("batchmaker").addresses.remote().result(timeout_s=LIMIT_S)
        return address, httpx.get(f"{address}/v2/replicas", timeout=LIMIT_S).json()

    serve.start(proxy_location="Disabled")
    try:
        config = fleet_config(models / "counter", fleet=FleetConfig(replicas=1))
        deploy(config)
        address, before = told()
        assert [one["replica"] for one in before] == [0]
        deploy(msgspec.structs.replace(config, trace_steps=7))
        wait_until(lambda: [one["replica"] for one in told()[1]] == [1], LIMIT_S)
        assert told()[0] == address, "the front is the same, its replica is new"
        answer = httpx.post(f"{address}/v2/models/counter/generate", json={"input_0": 3}, timeout=LIMIT_S)
        assert answer.json()["output_0"] == [1, 2, 3]
    finally:
        serve.shutdown()
