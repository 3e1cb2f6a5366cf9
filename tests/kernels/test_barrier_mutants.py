"""What the emulation is worth: each barrier taken out of the kernel, or built wrongly, must be found out."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from kernel_emulator import Emulator
from recurrence import expected_answer, largest_error, random_problem

from batchmaker.kernels.source import algorithm
from batchmaker.kernels.template import KernelConfig

NUM_SEEDS, MUST_FAIL = 20, 19
GRID = KernelConfig("lstm", "float32", "grid", 12, 2, 2, 2, 16, 1)
TWO_EXCHANGES = KernelConfig("gru-before", "float32", "grid", 12, 2, 2, 2, 16, 1)
ONCE = KernelConfig("gru-before-once", "float32", "grid", 12, 2, 2, 2, 16, 1)
CLUSTER = KernelConfig("gru", "float32", "cluster", 12, 2, 2, 2, 16, 1)
BLOCK = KernelConfig("lstm", "float32", "block", 12, 6, 2, 2, 32, 1)

ARRIVE = "block_barrier();\n        if (thread_index() == 0) {\n            add_release"
ADD = "add_release(arrivals, part == 0"
WAIT = "            await_flip(arrivals, phase);\n"
FLIP = "            phase ^= 0x80000000u;\n"
LEAVE = "        }\n        block_barrier();\n    }\n};"
WRITE = "const int at = (turn + 1) % 2 * P::STATE_SIZE"
READ = "global + turn % 2 * P::STATE_SIZE"
ARRIVED = "load_global(from + i));\n            block_barrier();"
MULTIPLIED = (
    "multiply<P, 0, P::GATES>(weights, exchange.current(), sums, active);\n            }\n            block_barrier();"
)
HALF = "                exchange.finish(active);\n                multiply"
BUFFER = "exchange.offer(pair.row, pair.unit, h[i]);"
CLUSTERED = "if constexpr (P::REGIME == CLUSTER) cluster_barrier();"
STARTED = "if (REGIME == CLUSTER)\n        cluster_barrier();"
CURRENT = "(P::REGIME == GRID ? 0 : turn % 2)"
OWN = "block_barrier();  // all of own() is there"
SHARES = "turn % 2 * P::SHARES_SIZE"
SCALED = "sigmoid(sum)));\n        }\n        block_barrier();"
ALONE = "if constexpr (P::REGIME == BLOCK) block_barrier();"
BEGUN = "tile.own_state(false);\n        block_barrier();"
LENGTHS = "call.length + first_row + row) : 0);\n    block_barrier();"
ENDED = "tile.own_state(true);\n        block_barrier();"
TOO_EARLY = (
    BUFFER + " store_global(call.h_state + (long long)load_constant(call.slot + first_row + pair.row)"
    " * P::HIDDEN + pair.unit, stored);"
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """The kernel with pieces of its source replaced; each piece is there exactly once."""

    name: str
    config: KernelConfig
    changes: tuple[tuple[str, str], ...]

    def source(self) -> str:
        text = algorithm()
        for piece, other in self.changes:
            assert text.count(piece) == 1, f"{self.name}: {piece!r} is there {text.count(piece)} times"
            text = text.replace(piece, other)
        return text


def without(piece: str) -> tuple[tuple[str, str], ...]:
    return ((piece, piece.replace("block_barrier();", "", 1)),)


MUTANTS = [
    Mutant("no block barrier before the release", GRID, without(ARRIVE)),
    Mutant("no release", GRID, ((ADD, ADD.replace("release", "relaxed")),)),
    Mutant("no wait", GRID, ((WAIT, ""),)),
    Mutant("no acquire", GRID, ((WAIT, WAIT.replace("flip", "flip_relaxed")),)),
    Mutant("the phase never flips", GRID, ((FLIP, ""),)),
    Mutant("one arrival too few", GRID, (("(P::BLOCKS - 1) : 1u", "P::BLOCKS : 1u"),)),
    Mutant("one arrival too many", GRID, (("(P::BLOCKS - 1) : 1u", "(P::BLOCKS - 2) : 1u"),)),
    Mutant("no block barrier after the wait", GRID, without(LEAVE)),
    Mutant("one buffer for the exchange", GRID, ((WRITE, WRITE.replace("(turn + 1) % 2", "0")), (READ, "global"))),
    Mutant("h is used before all of it has come", GRID, without(ARRIVED)),
    Mutant("gates before the sums are there", GRID, without(MULTIPLIED)),
    Mutant("state is written while others still read it", GRID, ((BUFFER, TOO_EARLY),)),
    Mutant("lengths are used before they are there", GRID, without(LENGTHS)),
    Mutant("h of the first step is used before it is there", GRID, without(BEGUN)),
    Mutant("the next tile begins in the middle of this one", GRID, without(ENDED)),
    Mutant("no exchange between the reset gate and its use", TWO_EXCHANGES, ((HALF, "++exchange.turn;\nmultiply"),)),
    Mutant("shares of the reset gate before h is there", ONCE, without(OWN)),
    Mutant("one buffer for the shares", ONCE, ((SHARES, SHARES.replace("turn % 2", "0")),)),
    Mutant("no barrier between r * h and its use", ONCE, without(SCALED)),
    Mutant("a block's barrier for a cluster", CLUSTER, ((CLUSTERED, CLUSTERED.replace("cluster_", "block_")),)),
    Mutant("peers are written to before they have begun", CLUSTER, ((STARTED, "if (false)\n        ;"),)),
    Mutant(
        "one buffer in the cluster",
        CLUSTER,
        ((WRITE, WRITE.replace("(turn + 1) % 2", "0")), (CURRENT, "0")),
    ),
    Mutant("no barrier at the end of a block's step", BLOCK, ((ALONE, ""),)),
]
RIGHT = [GRID, TWO_EXCHANGES, ONCE, CLUSTER, BLOCK]


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    configs = RIGHT + [mutant.config for mutant in MUTANTS]
    sources = [algorithm()] * len(RIGHT) + [mutant.source() for mutant in MUTANTS]
    return Emulator(tmp_path_factory.mktemp("mutants"), configs, sources)


def fails(emulator: Emulator, instance: int, config: KernelConfig, seed: int) -> bool:
    """Whether the emulation finds an error or a wrong number, with six tiles on two sets of blocks, in three calls."""
    for longest in (1, 3, 8):
        problem = random_problem(config, seed, batch=11, max_length=longest)
        answer = emulator.run(instance, problem, seed, teams=2)
        if answer.error or not largest_error(answer, expected_answer(config, problem)) < 1e-5:
            return True
    return False


def failures(emulator: Emulator, instance: int, config: KernelConfig) -> int:
    return sum(fails(emulator, instance, config, seed) for seed in range(NUM_SEEDS))


@pytest.mark.slow
@pytest.mark.parametrize("config", RIGHT, ids=lambda config: f"{config.cell} {config.regime}")
def test_the_right_barriers_never_fail(emulator, config):
    assert failures(emulator, RIGHT.index(config), config) == 0


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_barrier_is_found_out(emulator, mutant):
    assert failures(emulator, len(RIGHT) + MUTANTS.index(mutant), mutant.config) >= MUST_FAIL
