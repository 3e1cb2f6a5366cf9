"""The NPU model against Table II of LazyBatching: latency of one request alone, raw.

    python papers/benchmarks/npu.py [--words 17] [--json FILE]

Milliseconds, by dataflow and bytes per value. Nothing is measured: shapes come from the models, made without weights.
A request's nodes of one type that do not follow each other, such as the elements of a map, count as one call.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from batchmaker.lab import zoo
from batchmaker.lab.zoo.blueprint import Blueprint, blueprint
from batchmaker_papers.npu import Npu, dataflow_named
from batchmaker_papers.npu.operations import registry_operations
from shared import RESULTS, made_by

TABLE_II_MS = {"resnet50": 1.1, "gnmt": 7.2, "transformer": 2.4}
OTHERS = ("vgg16", "mobilenet", "bert", "las", "deepspeech2")
MEASURES: Final = (
    "papers/benchmarks/npu.py", "papers/src/batchmaker_papers/npu", *(f"src/batchmaker/lab/zoo/{name}.py" for name in (
        "attention", "bert", "blueprint", "deepspeech2", "gnmt", "las", "parts", "transformer", "translation", "vision"
    )),
)  # fmt: skip


def latency_ms(network: Blueprint, words: int, npu: Npu, dataflow: str) -> float:
    """Return the time of one request with a source of so many elements and so many words of output."""
    graph = network.sized(words, words).graph
    calls: Counter[tuple[int, int]] = Counter({(int(run.type_id), 1): 0 for run in graph.runs})
    for run in graph.runs:
        calls[int(run.type_id), 1] += run.length
    for block in graph.blocks:
        for type_id, count in zip(*np.unique(block.types, return_counts=True), strict=True):
            calls[int(type_id), int(count)] += 1
    operations = registry_operations(network.shapes)
    names, most = list(operations), max(batch for _, batch in calls)
    seconds = npu.latency_table(operations, most, dataflow_named(dataflow)).dense(names, most)
    return 1e3 * float(sum(times * seconds[type_id, batch] for (type_id, batch), times in calls.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, default=17)
    parser.add_argument("--quick", action="store_true", help="the first network alone")
    parser.add_argument("--json", type=Path, default=RESULTS / "npu.json")
    options = parser.parse_args()
    rows = []
    for name in (*TABLE_II_MS, *OTHERS)[: 1 if options.quick else None]:
        network = blueprint(name, partial(zoo.make, name))
        row = {"model": name, "table_ii_ms": TABLE_II_MS.get(name)}
        for dataflow in ("ws", "os", "tpu"):
            for width in (1, 2):
                row[f"{dataflow}_{width}"] = latency_ms(network, options.words, Npu(bytes_per_value=width), dataflow)
        rows.append(row)
        print("  ".join(f"{key} {value:.2f}" if isinstance(value, float) else f"{value}" for key, value in row.items()))
    content = {
        **made_by(MEASURES, f"python papers/benchmarks/npu.py --words {options.words}"),
        "words": options.words,
        "quick": options.quick,
    }
    options.json.write_text(json.dumps({**content, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
