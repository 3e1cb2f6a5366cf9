"""Each change of the kernels below makes requests fail. Run as a program, it says which were found.

Each mutant runs in a forked process: it may write anywhere.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "executor"), str(HERE.parent)]

import torch  # noqa: E402
from played_requests import TINY, crowded, play  # noqa: E402

from insides import take_entries_without_room  # noqa: E402

MUTANTS = {
    "none": ("", ""),
    "a ring that takes one too many": ("", ""),
    "a missing decrement": ("add(&reader[ENTRY_MISSING], -1) == 1", "reader[ENTRY_MISSING] == 1"),
    "a reader that is ready at its first source": (
        "if (add(&reader[ENTRY_MISSING], -1) == 1) push", "if (add(&reader[ENTRY_MISSING], -1) > 0) push",
    ),
    "a ring one too short": ("n % of[TYPE_SIZE];", "n % (of[TYPE_SIZE] - 1);"),
    "a count that is not reset": ("of[TYPE_NUM_RUNS] = runs;", "of[TYPE_NUM_RUNS] = runs ? runs : of[TYPE_NUM_RUNS];"),
    "a head that stays": ("of[TYPE_NODES_HEAD] += nodes;", ""),
    "a step that is not counted": ("entry[ENTRY_STEP] = step + 1;", ""),
    "a count that is no atomic": (
        "{ return (i64)atomicAdd((u64*)number, (u64)more); }",
        "{ i64 was = *number; atomicAdd((u64*)&unused, 0); *number = was + more; return was; }",
    ),
    "no barrier before the step is counted": ("__syncthreads();  // all threads have read the step", ""),
    "a state that is not kept": ("if (output[OUTPUT_STATE] != NONE && !ends) copy_row", "if (false) copy_row"),
    "steps in one place": ("where + step * stride;", "where;"),
    "a cancelled request that reads": ("where == NONE || request[REQUEST_CANCELLED] ?", "where == NONE ?"),
    "an answer before the last entry": ("add(&request[REQUEST_LEFT], -1) != 1", "add(&request[REQUEST_LEFT], -1) > 2"),
    "a loop that goes on": ("until != NONE &&", "false &&"),
    "a short number that is read as a long one": ("== 4 ? *(const int*)at :", "== 4 ? *(const i64*)at :"),
    "a length that is not told": ("!cancelled && entry[ENTRY_LENGTH]", "false && entry[ENTRY_LENGTH]"),
    "a page that is not written": ("page[PAGE_ENDED] = board[BOARD_ENDED];", ""),
}  # fmt: skip


_UNUSED = "typedef unsigned long long u64;"
_PATIENCE_S = 30


def mutant(name: str, source: str) -> str:
    before, after = MUTANTS[name]
    if not before:
        return source
    assert source.count(before) >= 1, name
    return source.replace(before, after).replace(_UNUSED, f"{_UNUSED}\nstatic u64 unused;")


def survives(name: str) -> bool:
    """Whether random requests are answered as they should."""
    child = os.fork()
    if child == 0:
        signal.alarm(_PATIENCE_S)
        if name == "a ring that takes one too many":
            take_entries_without_room()
        try:
            for seed in range(4 if name == "none" else 12):
                play(seed, 12, mutate=lambda source: mutant(name, source), sizes=replace(TINY, ring=40))
                crowded(seed, lambda source: mutant(name, source))
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in MUTANTS:
        print(f"{name}: {'survived' if survives(name) else 'found'}", flush=True)
