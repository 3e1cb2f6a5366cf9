"""The capacity and speed of GPUs: the numbers of the cost model, each with its source.

[S] NVIDIA's data sheet, programming guide or white paper. [E] our estimate. [P] published microbenchmarks: Luo et al.,
arXiv 2402.13499 (L24) and 2501.12084 (L25); Burtchell and Burtscher, IISWC 2024 (BB24); Luo et al., ClusterFusion,
arXiv 2508.18850 (CF25); Li et al., CREDIT, arXiv 2609.01864 (CR26); Chips and Cheese on the H100, 2023 (CC23).
Measurements on other boards of the same architecture are used for it. A run of the tuner on the device is more
reliable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from batchmaker.errors import OptionError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Clocks in the cost model. The defaults hold for both architectures.

    Latencies are from issue to use. *_per_clock: of one SM. mma_clocks: of one scheduler, for one mma.m16n8k16.
    l2_latency: to the farther half of L2, because an exchange waits for the last. cluster_barrier: including stores
    into peers; measured for two blocks, its growth is unknown.
    """

    fma_latency: float = 4  # [P] L24
    shared_latency: float = 29  # [P] L25
    shared_bytes_per_clock: float = 128  # [S]
    shuffle_latency: float = 25  # [P] BB24
    shuffle_lanes_per_clock: float = 32  # [S]
    mma_latency: float = 33  # [P] L24
    mma_clocks: float
    barrier_clocks: float = 21  # [P] BB24, of a block; and for each of its warps
    barrier_clocks_per_warp: float = 2  # [P] BB24
    gates_latency: float = 160  # [E] four exponentials and divisions in sequence, and their operands
    gates_instructions: float = 70  # [E] of one warp, for one unit of one row
    l2_latency: float
    l2_bytes_per_clock: float = 64  # [S] one SM alone
    l2_total_bytes_per_clock: float
    l2_atomic_clocks: float = 2  # [E] between two arrivals at one counter
    cluster_barrier: float = 850  # [P] CR26
    peer_bytes_per_clock: float = 12.5  # [P] CF25, 2.9 TB/s over all SMs in clusters of 16
    dram_latency: float
    launch_s: float = 5e-6  # [E] a cooperative or cluster launch, on an idle stream
    recorded_launch_s: float = 1.5e-6  # [E] from one small kernel of a CUDA graph to the next
    library_share: float = 0.7  # [E] share of its peak that a library's matrix product reaches


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One kind of GPU.

    shared_bytes: dynamic shared memory that a block can request. processor_clusters: SMs of each GPC; a thread-block
    cluster must lie within one GPC; empty: no clusters. clock_hz: under load. dram_bytes_per_s: peak. registers: of 32
    bits, of an SM.
    """

    name: str
    arch: str
    sms: int
    clock_hz: float
    shared_bytes: int
    dram_bytes_per_s: float
    l2_bytes: int
    timings: Timings
    processor_clusters: tuple[int, ...] = ()
    registers: int = 65_536
    max_threads: int = 1024
    max_registers_per_thread: int = 255

    def resident(self, blocks: int, *, cluster: bool) -> int:
        """Return how many teams of `blocks` blocks can run at once, one block to an SM."""
        if cluster:
            return sum(sms // blocks for sms in self.processor_clusters)
        return self.sms // blocks

    @property
    def on_chip_bytes(self) -> int:
        """Registers and shared memory of all SMs."""
        return self.sms * (4 * self.registers + self.shared_bytes)


A100: Final = DeviceSpec(
    name="A100",
    arch="sm_80",
    sms=108,
    clock_hz=1.41e9,  # [S]
    shared_bytes=163 << 10,
    dram_bytes_per_s=1.555e12,  # [S] of the 40 GB model
    l2_bytes=40 << 20,
    timings=Timings(
        mma_clocks=8,  # [S]
        l2_latency=357,  # [P] L25
        l2_total_bytes_per_clock=3000,  # [E] the white paper says 5120
        dram_latency=623,  # [P] L25
    ),
)
H200: Final = DeviceSpec(
    name="H200",
    arch="sm_90",
    sms=132,
    clock_hz=1.755e9,  # [E] between its base and its boost of 1.98 GHz
    shared_bytes=227 << 10,
    dram_bytes_per_s=4.8e12,  # [S]; an H100 has 3.35e12
    l2_bytes=50 << 20,
    timings=Timings(
        mma_clocks=6.4,  # [P] L24: mma.sync reaches 63 % of the tensor cores' peak
        l2_latency=414,  # [P] L25
        l2_total_bytes_per_clock=3200,  # [P] CC23
        dram_latency=680,  # [E]
    ),
    processor_clusters=(16, 16, 16, 16, 16, 16, 18, 18),  # [E] 132 SMs are enabled in 8 GPCs of up to 18
)
_MODELLED: Final = {device.arch: device for device in (A100, H200)}


def modelled(arch: str) -> DeviceSpec:
    """Return the device whose numbers are used for `arch`; sm_90a is sm_90 with more instructions.

    OptionError for an architecture without numbers in the cost model.
    """
    device = _MODELLED.get(arch.removesuffix("a"))
    if device is None:
        raise OptionError(
            f"arch {arch!r}: there is a cost model for {', '.join(_MODELLED)}. For a newer GPU give the newest; "
            "older ones are not supported."
        )
    return device
