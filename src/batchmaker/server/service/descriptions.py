"""Descriptions of the server and its models, in the JSON of the Open Inference Protocol and Triton's extensions."""

from __future__ import annotations

from typing import Any, Final

import batchmaker
from batchmaker.server.formats.signature import TensorSpec
from batchmaker.server.service.served_model import ServedModel

PLATFORM: Final = "batchmaker"
EXTENSIONS: Final = (
    "binary_tensor_data",
    "parameters",
    "schedule_policy",
    "sequence",
    "statistics",
    "model_repository",
    "model_configuration",
    "generate",
)
"""The implemented extensions."""


def server_metadata() -> dict[str, Any]:
    """GET /v2."""
    return {"name": "batchmaker", "version": batchmaker.__version__, "extensions": EXTENSIONS}


def model_metadata(model: ServedModel, versions: tuple[str, ...]) -> dict[str, Any]:
    """GET /v2/models/M."""
    return {
        "name": model.name,
        "versions": versions,
        "platform": PLATFORM,
        "inputs": [_tensor(spec) for spec in model.signature.inputs],
        "outputs": [_tensor(spec) for spec in model.signature.outputs],
    }


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": spec.shape}


def model_config(model: ServedModel) -> dict[str, Any]:
    """GET /v2/models/M/config.

    max_batch_size is 0: a request is one example, and the engine forms the batches. A model that takes sequences says
    so in `parameters`. Triton's sequence_batching means that it takes only sequences: where `sequences_only` is set.
    """
    config: dict[str, Any] = {
        "name": model.name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "max_batch_size": 0,
        "input": [{**_dims(spec), "optional": spec.optional} for spec in model.signature.inputs],
        "output": [_dims(spec) for spec in model.signature.outputs],
        "model_transaction_policy": {"decoupled": False},
    }
    if model.port.takes_sequences:
        microseconds = int(1e6 * model.sequences.idle_s)
        config["parameters"] = {
            "max_sequence_idle_microseconds": {"string_value": str(microseconds)},
            "max_chunks_ahead": {"string_value": str(model.sequences.chunks_ahead)},
        }
        if model.sequences_only:
            config["sequence_batching"] = {"max_sequence_idle_microseconds": microseconds}
    return config


def _dims(spec: TensorSpec) -> dict[str, Any]:
    datatype = "STRING" if spec.datatype == "BYTES" else spec.datatype
    return {"name": spec.name, "data_type": f"TYPE_{datatype}", "dims": spec.shape}


def model_statistics(model: ServedModel) -> dict[str, Any]:
    """One entry of GET /v2/models/M/stats. An execution is one batched call of a cell."""
    counts = model.statistics
    done = counts.succeeded
    times = (counts.queue_s, counts.input_s, counts.compute_s, counts.output_s)
    failed = sum(counts.failed.values()) + sum(counts.refused.values())
    return {
        "name": model.name,
        "version": model.version,
        "last_inference": int(1e3 * counts.last_unix_s),
        "inference_count": done,
        "execution_count": model.port.stats.steps,
        "inference_stats": {
            "success": _duration(done, sum(times)),
            "fail": _duration(failed, counts.failed_s),
            "queue": _duration(done, counts.queue_s),
            "compute_input": _duration(done, counts.input_s),
            "compute_infer": _duration(done, counts.compute_s),
            "compute_output": _duration(done, counts.output_s),
            "cache_hit": _duration(0, 0.0),
            "cache_miss": _duration(0, 0.0),
        },
        "batch_stats": [],
        "memory_usage": [],
    }


def _duration(count: int, seconds: float) -> dict[str, int]:
    return {"count": count, "ns": int(1e9 * seconds)}
