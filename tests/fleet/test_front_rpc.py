"""gRPC through the front: unmodified stubs of tritonclient, streams and sequences included."""

from __future__ import annotations

import asyncio

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from fleets_in_process import fleet_config, played
from served_models import waiting_at
from triton_calls import ask, ask_in_a_stream, given

from batchmaker.server.config import FleetConfig


def test_tritonclient_works_unchanged_over_grpc(models):
    async def scenario(fleet):
        single, chunks = await asyncio.to_thread(ask, fleet.grpc)
        assert single == [n * n for n in range(6)]
        assert chunks == [1, 5, 14]
        assert fleet.server.balancer.num_sequences == 0
        assert min(one.routed for one in fleet.server.balancer.replicas.values()) >= 2

    played(scenario, fleet_config(models[0], grpc_port=0))


def test_a_stream_is_answered_in_order_by_both_replicas(models):
    async def scenario(fleet):
        ids, totals, parts = await asyncio.to_thread(ask_in_a_stream, fleet.grpc)
        assert ids == [str(n) for n in range(20)]
        running_sum = np.cumsum([(n % 4) ** 2 for n in range(1, 20, 2)])
        assert totals[1::2] == list(running_sum)
        assert totals[::2] == [(n % 4) ** 2 for n in range(0, 20, 2)]
        assert [part.as_numpy("output_0").item() for part in parts[:4]] == [1, 2, 3, 4]
        assert parts[4].get_response().parameters["triton_final_response"].bool_param
        assert min(one.routed for one in fleet.server.balancer.replicas.values()) >= 2

    played(scenario, fleet_config(models[0], grpc_port=0))


def test_a_call_whose_replica_ends_is_given_to_no_other_one_and_a_chunk_says_more(models):
    folder, gate = models
    come = waiting_at(gate)
    gate.unlink(missing_ok=True)
    come.unlink(missing_ok=True)

    async def scenario(fleet):
        def infer(**options):
            with triton.InferenceServerClient(fleet.grpc) as client:
                return client.infer("gated", given(3), **options)

        def have_come():  # both are counted, and the first of each replica has left the front
            counts = [one.num_requests for one in balancer.replicas.values()]
            return sum(counts) == 2 and come.exists() and come.stat().st_size >= sum(map(bool, counts))

        waiting = asyncio.ensure_future(asyncio.to_thread(infer))
        chunk = asyncio.ensure_future(asyncio.to_thread(infer, sequence_id=4, sequence_start=True))
        balancer = fleet.server.balancer
        await fleet.wait_for(have_come)
        for number, replica in fleet.replicas.items():
            if balancer.replicas[number].num_requests:
                replica.die()
        gate.touch()
        with pytest.raises(triton.InferenceServerException, match="the sequence with it") as ended:
            await chunk
        assert ended.value.status() == str(grpc.StatusCode.UNAVAILABLE)
        with pytest.raises(triton.InferenceServerException, match="which may be the cause") as ended:
            await waiting
        assert ended.value.status() == str(grpc.StatusCode.UNAVAILABLE)
        assert fleet.server.front.num_retried == 0

    played(scenario, fleet_config(folder, grpc_port=0, fleet=FleetConfig(replicas=3)))
