"""DyNet with automatic batching on the trees and sentences of ed_batch_throughput.py; run where DyNet is installed.

    python -m venv dynet && dynet/bin/pip install dyNET38 "numpy<2"
    dynet/bin/python benchmarks/dynet_peer.py INPUTS.json OUT.json [--strategy 1 2] [--rounds 5] [--sizes 64 256]

INPUTS: what `ed_batch_throughput.py peer` wrote, or one of its two workloads. Strategy 1 is DyNet's agenda, 2 its
depth. A process per strategy, one thread, forward only, hidden = embedding = 256: a binary TreeLSTM, answered with the
root's state, and a tagger of two LSTM layers in each direction with a hidden layer over both. Seconds are this
process's CPU time, so that others on the machine matter less; graphs are built in Python, which is told apart.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

HIDDEN = 256
TAGS = 9
SIZES = (1, 8, 16, 32, 64, 128, 256)
NAMES = {1: "agenda", 2: "depth"}


class TreeLstm:
    """As lab/zoo/treelstm.py: i, o, u from both children in one product of 3 x 256, a forget gate from each child."""

    def __init__(self, dy: Any, vocabulary_size: int) -> None:
        self.dy, parameters = dy, dy.ParameterCollection()
        self.parameters = parameters
        self.words = parameters.add_lookup_parameters((vocabulary_size, HIDDEN))
        self.leaf, self.leaf_bias = (
            parameters.add_parameters((3 * HIDDEN, HIDDEN)),
            parameters.add_parameters(3 * HIDDEN),
        )
        self.gates = [parameters.add_parameters((3 * HIDDEN, HIDDEN)) for _ in range(2)]
        self.bias = parameters.add_parameters(3 * HIDDEN)
        self.forget = [parameters.add_parameters((HIDDEN, HIDDEN)) for _ in range(2)]
        self.forget_bias = [parameters.add_parameters(HIDDEN) for _ in range(2)]

    def build(self, request: dict[str, Any]) -> Any:
        dy = self.dy
        nodes = [self._leaf(word) for word in request["words"]]
        for left, right in request["children"]:
            (h1, c1), (h2, c2) = nodes[left], nodes[right]
            iou = dy.affine_transform([self.bias, self.gates[0], h1, self.gates[1], h2])
            f1 = dy.logistic(dy.affine_transform([self.forget_bias[0], self.forget[0], h1]))
            f2 = dy.logistic(dy.affine_transform([self.forget_bias[1], self.forget[1], h2]))
            i, o, u = self._gates(iou)
            c = dy.cmult(i, u) + dy.cmult(f1, c1) + dy.cmult(f2, c2)
            nodes.append((dy.cmult(o, dy.tanh(c)), c))
        return nodes[-1][0]

    def _leaf(self, word: int) -> tuple[Any, Any]:
        i, o, u = self._gates(self.dy.affine_transform([self.leaf_bias, self.leaf, self.words[word]]))
        c = self.dy.cmult(i, u)
        return self.dy.cmult(o, self.dy.tanh(c)), c

    def _gates(self, iou: Any) -> tuple[Any, Any, Any]:
        dy = self.dy
        io = dy.logistic(dy.pick_range(iou, 0, 2 * HIDDEN))
        return dy.pick_range(io, 0, HIDDEN), dy.pick_range(io, HIDDEN, 2 * HIDDEN), dy.tanh(
            dy.pick_range(iou, 2 * HIDDEN, 3 * HIDDEN)
        )  # fmt: skip


class Tagger:
    """As lab/zoo/tagger.py, with one of DyNet's LSTM builders."""

    def __init__(self, dy: Any, vocabulary_size: int, builder: str) -> None:
        self.dy, parameters = dy, dy.ParameterCollection()
        self.parameters = parameters
        self.words = parameters.add_lookup_parameters((vocabulary_size, HIDDEN))
        self.directions = [getattr(dy, builder)(2, HIDDEN, HIDDEN, parameters) for _ in range(2)]
        self.hidden = [parameters.add_parameters((HIDDEN, HIDDEN)) for _ in range(2)]
        self.hidden_bias = parameters.add_parameters(HIDDEN)
        self.scores, self.scores_bias = parameters.add_parameters((TAGS, HIDDEN)), parameters.add_parameters(TAGS)

    def build(self, request: list[int]) -> Any:
        dy = self.dy
        words = [self.words[word] for word in request]
        forwards = self.directions[0].initial_state().transduce(words)
        backwards = self.directions[1].initial_state().transduce(words[::-1])[::-1]
        scores = []
        for f, b in zip(forwards, backwards, strict=True):
            hidden = dy.tanh(dy.affine_transform([self.hidden_bias, self.hidden[0], f, self.hidden[1], b]))
            scores.append(dy.affine_transform([self.scores_bias, self.scores, hidden]))
        return dy.concatenate_cols(scores)


def measured(dy: Any, network: Any, requests: list[Any], size: int) -> tuple[float, float]:
    """Return CPU seconds of a round of all requests in mini-batches of this size: building graphs, and in all."""
    building_s, began_s = 0.0, time.process_time()
    for at in range(0, len(requests), size):
        from_s = time.process_time()
        dy.renew_cg()
        results = [network.build(request) for request in requests[at : at + size]]
        building_s += time.process_time() - from_s
        dy.forward(results)
        for result in results:
            result.npvalue()
    return building_s, time.process_time() - began_s


def rates(dy: Any, inputs: dict[str, Any], rounds: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return requests per second of each network at each size, medians over rounds. Networks without inputs are left
    out."""
    networks = {
        ("treelstm", "-"): TreeLstm(dy, inputs["vocabulary_size"]),
        ("bilstm-tagger", "VanillaLSTMBuilder"): Tagger(dy, inputs["vocabulary_size"], "VanillaLSTMBuilder"),
        ("bilstm-tagger", "CompactVanillaLSTMBuilder"): Tagger(
            dy, inputs["vocabulary_size"], "CompactVanillaLSTMBuilder"
        ),
    }
    rows = []
    for (workload, builder), network in networks.items():
        if workload not in inputs:
            continue
        requests = inputs[workload]
        measured(dy, network, requests[:64], 64)
        for size in sizes:
            part = requests[: max(64, size)] if size < 16 else requests
            rounds_s = [measured(dy, network, part, size) for _ in range(rounds)]
            building_s, total_s = (median(column) for column in zip(*rounds_s, strict=True))
            rows.append(
                {
                    "workload": workload,
                    "builder": builder,
                    "size": size,
                    "per_s": len(part) / total_s,
                    "per_s_without_building": len(part) / (total_s - building_s),
                }
            )
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--strategy", type=int, nargs="+", default=[1, 2], choices=NAMES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--label", default="dyNET38 from PyPI", help="Which build of DyNet this is.")
    options = parser.parse_args()
    inputs = json.loads(options.inputs.read_text("utf-8"))
    if len(options.strategy) == 1:
        import _dynet as dy

        sys.argv = [sys.argv[0], "--dynet-autobatch", str(options.strategy[0]), "--dynet-mem", "2048"]
        parameters = dy.DynetParams()
        parameters.from_args()
        parameters.init()
        about = {"strategy": NAMES[options.strategy[0]], "build": options.label}
        rows = [{**row, **about} for row in rates(dy, inputs, options.rounds, options.sizes)]
    else:
        rows = []
        for strategy in options.strategy:
            part = options.out.with_suffix(f".{strategy}.json")
            command = [sys.executable, __file__, str(options.inputs), str(part), "--strategy", str(strategy)]
            more = ["--rounds", str(options.rounds), "--label", options.label, "--sizes", *map(str, options.sizes)]
            subprocess.run([*command, *more], check=True, env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
            rows += json.loads(part.read_text("utf-8"))
            part.unlink()
    options.out.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
