"""All runs whose results are in the repository, and the results that are older than the code they measure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Run:
    """One command and what it writes. results: files in `results/` beside its script. page: where its tables are.

    probe: name of a function in the script of the same name (with _ for -) that plays a little of it again, for
    simulations: a result is current if that comes out the same, whatever was changed in the code.
    """

    name: str
    command: str
    results: tuple[str, ...]
    minutes: int
    page: str = ""
    probe: str = ""


RUNS: Final[dict[str, Run]] = {
    run.name: run
    for run in (
        Run("curves", "python papers/benchmarks/curves.py --data DATA --jobs 2", ("curves.json",), 15, "curves.md",
            "probe"),
        Run("curves-costs", "python papers/benchmarks/curves.py --measure", ("curves-costs.json",), 1, "curves.md"),
        Run("curves-dynet", "python papers/benchmarks/curves.py --keep-dynet DYNET.json", ("curves-dynet.json",), 1,
            "curves.md"),
        Run("curves-live", "python papers/benchmarks/curves.py --live --data DATA", ("curves-live.json",), 3,
            "curves.md"),
        Run("batching-and-cells", "python benchmarks/batching_and_cells.py --data DATA", ("batching-and-cells.json",),
            14, "benchmarks-in-full.md"),
        Run("step-times", "benchmarks/step_times.sh", ("profile-lstm.json",), 1, "../../docs/benchmarks.md"),
        Run("overhead", "python benchmarks/overhead.py --data DATA --dynet-python PYTHON --litserve-python PYTHON",
            ("overhead.json", "overhead-avx2.json"), 16, "benchmarks-in-full.md"),
        Run("lazybatching", "python papers/benchmarks/lazybatching.py --data DATA --full --jobs 2",
            ("lazybatching.json",), 75, "lazybatching.md", "probe"),
        Run("lazybatching-live", "python papers/benchmarks/lazybatching_live.py", ("lazybatching-live.json",), 13,
            "lazybatching.md"),
        Run("npu", "python papers/benchmarks/npu.py --words 17", ("npu.json",), 1, "lazybatching.md"),
        Run("simulator", "python papers/benchmarks/simulator.py --requests 20000", ("simulator.json",), 1,
            "simulations.md"),
        Run("simulated-and-real", "python benchmarks/simulated_and_real.py --data DATA/europarl_deen/raw5k.en",
            ("simulated-and-real.json",), 11, "lazybatching.md"),
        Run("ed-batch", "python papers/benchmarks/ed_batch.py DATA", ("ed-batch.json",), 3, "ed-batch.md"),
        Run("ed-batch-seeds", "python papers/benchmarks/ed_batch_seeds.py DATA --jobs 2", ("ed-batch-seeds.json",), 4,
            "ed-batch.md"),
        Run("ed-batch-throughput", "python papers/benchmarks/ed_batch_throughput.py run DATA",
            ("ed-batch-throughput.json",), 30, "ed-batch-throughput.md"),
        Run("ed-batch-sizes", "python papers/benchmarks/ed_batch_sizes.py DATA --dynet-python PYTHON",
            ("ed-batch-sizes.json",), 35, "ed-batch-throughput.md"),
        Run("planner", "python papers/benchmarks/planner.py", ("planner.json",), 2, "cell-planning.md"),
        Run("pq-tree", "python papers/benchmarks/pq_tree.py", ("pq-tree.json",), 1, "cell-planning.md"),
        Run("kernel-configurations", "python papers/benchmarks/kernel_configurations.py --arch sm_90 sm_80",
            ("kernel-configurations.json",), 2, "kernels.md"),
        Run("gpu", "python benchmarks/gpu.py", ("gpu.json", "gpu-kernels.json"), 5, "gpu-results.md"),
        Run("learned-online", "python papers/benchmarks/learned_online.py", ("learned-online.json",), 20,
            "learned-online.md"),
        Run("default-policy",
            "python benchmarks/default_policy.py --requests 60 --seeds 20 --trace CSV --jobs 2",
            ("default-policy.json", "default-policy-costs.json"), 60, "default-policy.md", "probe"),
        Run("default-policy-live", "python benchmarks/default_policy_live.py", ("default-policy-live.json",), 15,
            "default-policy.md"),
        Run("short-decoders", "python benchmarks/short_decoders.py --data DATA", ("short-decoders.json",), 1,
            "default-policy.md"),
        Run("live-beside", "python benchmarks/live_beside.py", ("live-beside.json",), 3, "default-policy.md"),
        Run("moved-sequences", "python benchmarks/moved_sequences.py", ("moved-sequences.json",), 2,
            "fleet-serving-results.md"),
        Run("live-streams", "python benchmarks/live_streams.py --all", ("live-streams.json",), 5,
            "live-streams-results.md"),
        Run("live-sizes", "python benchmarks/live_sizes.py --page papers/docs/live-streams-results.md",
            ("live-sizes.json",), 7, "live-streams-results.md"),
        Run("deterministic", "python benchmarks/deterministic.py", ("deterministic.json",), 4,
            "deterministic-results.md"),
        Run("fleet", "python benchmarks/fleet.py", ("fleet.json", "fleet-costs.json"), 10,
            "simulations.md"),
        Run("fleet-simulated-and-real", "python benchmarks/fleet_simulated_and_real.py DATA", (
            "fleet-simulated-and-real.json",), 7, "simulations.md"),
        Run("examples", "python benchmarks/examples.py --data DATA --dynet-python PYTHON", ("examples.json",), 20,
            "../../docs/which-models-gain.md"),
        Run("serving", "benchmarks/serving/*.py", (
            "serving-lstm.json", "serving-loadgen.json", "serving-overhead.json", "serving-overload-lstm.json",
            "serving-overload-lstm-fleet.json",
            "serving-perf-analyzer.json", "serving-perf-analyzer-sequences.json"), 20, "serving-benchmarks.md"),
        Run("soak", "python benchmarks/soak.py requests; python benchmarks/soak.py memory",
            ("soak-requests.json", "soak-memory.json"), 15, "soak-results.md"),
        Run("fleet-serving", "python benchmarks/fleet_serving.py DATA", (
            "serving-fleet-overhead.json", "serving-fleet-proxies.json", "serving-fleet-replicas.json",
            "serving-fleet-routers.json", "serving-fleet-bulk.json", "serving-fleet-rows.json"), 20,
            "fleet-serving-results.md"),
        Run("hand-written", "python benchmarks/hand_written.py", ("hand_written.json",), 5,
            "../../docs/decisions/0006-dependencies.md"),
    )
}  # fmt: skip

OLDER: Final = frozenset((
    "curves-costs.json", "learned-online.json",
    "examples.json", "serving-lstm.json", "serving-loadgen.json",
    "serving-overhead.json", "serving-perf-analyzer.json", "serving-perf-analyzer-sequences.json",
    "serving-overload-lstm-fleet.json",
    "serving-fleet-overhead.json", "serving-fleet-proxies.json", "serving-fleet-replicas.json",
    "serving-fleet-routers.json", "serving-fleet-bulk.json", "serving-fleet-rows.json",
    "fleet-simulated-and-real.json", "fleet.json", "fleet-costs.json", "overhead.json", "curves-live.json",
    "batching-and-cells.json", "profile-lstm.json", "overhead-avx2.json", "lazybatching-live.json", "npu.json",
    "simulator.json", "simulated-and-real.json", "ed-batch.json", "ed-batch-seeds.json", "ed-batch-throughput.json",
    "ed-batch-sizes.json", "planner.json", "gpu.json", "default-policy-live.json", "short-decoders.json",
    "serving-overload-lstm.json", "default-policy.json", "default-policy-costs.json",
    "kernel-configurations.json", "gpu-kernels.json", "soak-memory.json", "soak-requests.json",
    "deterministic.json", "pq-tree.json", "live-beside.json", "live-sizes.json",
    "hand_written.json", "live-streams.json", "moved-sequences.json",
))  # fmt: skip
"""Results whose code has changed since, or that do not say what they measure: marked on the page. A result leaves this
list when its benchmark declares what it measures (`provenance.made_by`) and has been run again."""
