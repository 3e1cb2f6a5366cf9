"""A first start compiles what it needs in other processes, each loop once, and whatever befalls them it goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

pytestmark = pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled")

LOOPS: Final = """
import os, sys
import numpy as np
from numba.core import event
from batchmaker.compiled import compiled, compiled_within

class Listener(event.Listener):
    def on_start(self, seen):
        name = seen.data["dispatcher"].py_func.__name__
        if seen.data["dispatcher"].py_func.__module__ == __name__:
            with open("compiled.txt", "a") as file:
                print(name, os.getpid(), "torch" in sys.modules, file=file)

    def on_end(self, seen):
        pass

event.register("numba:compile", Listener())

@compiled_within
def add(sums, value):
    sums[0] += value

@compiled
def shared(values):
    return values[0] + values[1]

@compiled
def total(values):
    sums = np.zeros(1, values.dtype)
    for value in values:
        add(sums, value)
    return sums[0] + shared(values)

@compiled
def largest(values):
    return values.max()

def prepare():
    total(np.zeros(2, np.int64))
    largest(np.zeros(2))
"""

START: Final = """
import os, sys
import loops
from batchmaker.compiling import compiled_ahead

print("begun")  # once: the processes do not run the script, which has no guard
with compiled_ahead(["loops:prepare"], int(sys.argv[1])):
    loops.prepare()
print(os.getpid(), loops.total.signatures, loops.largest.signatures)
"""


class Place:
    """A folder with a module of loops, and a script that starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "loops.py").write_text(LOOPS)
        (folder / "start.py").write_text(START)

    def start(self, processes: int = 2, **environment: str) -> int:
        """Run the script until it has ended; return the number of its process."""
        told = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "NUMBA_CACHE_DIR": str(self.folder / "kept"),
            **environment,
        }
        done = subprocess.run(
            [sys.executable, "-S", "start.py", str(processes)],
            cwd=self.folder, env=told, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        begun, number = done.stdout.split(maxsplit=2)[:2]
        assert begun == "begun"
        assert done.stdout.count("begun") == 1
        return int(number)

    def compiled(self) -> list[tuple[str, int]]:
        """The loops that were compiled so far, with the numbers of the processes. None of these had loaded torch."""
        path = self.folder / "compiled.txt"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        assert all(torch == "False" for _, _, torch in lines)
        return [(name, int(process)) for name, process, _ in lines]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


NUM_LOOPS: Final = 63
"""Loops of a start of an LSTM under the default policy, those of other loops not counted. More make it longer."""

ALL: Final = ["add", "largest", "shared", "total"]


@pytest.mark.slow
def test_each_loop_is_compiled_once_by_another_process_and_a_second_start_compiles_nothing(place: Place) -> None:
    own = place.start()
    assert sorted(name for name, _ in place.compiled()) == ALL
    assert own not in {process for _, process in place.compiled()}
    place.start()
    assert len(place.compiled()) == len(ALL)


@pytest.mark.slow
def test_with_one_processor_the_start_compiles_by_itself_and_keeps_it(place: Place) -> None:
    own = place.start(processes=1)
    assert sorted(place.compiled()) == [(name, own) for name in ALL]
    place.start()
    assert len(place.compiled()) == len(ALL)


@pytest.mark.parametrize(
    "when",
    [pytest.param("1", id="the one that learns"), pytest.param("0", id="those that compile", marks=pytest.mark.slow)],
)
def test_what_processes_that_die_have_not_compiled_the_start_compiles_itself(place: Place, when: str) -> None:
    dies = f"import os\nif 'BATCHMAKER_COMPILES' in os.environ and os.environ['NUMBA_DISABLE_JIT'] == '{when}':\n"
    (place.folder / "loops.py").write_text(dies + "    os._exit(3)\n" + LOOPS)
    own = place.start()
    assert sorted(place.compiled()) == [(name, own) for name in ALL]


@pytest.mark.slow
def test_a_process_that_does_not_answer_is_ended(place: Place) -> None:
    hangs = "import os, time\nif 'BATCHMAKER_COMPILES' in os.environ:\n    time.sleep(3600)\n"
    (place.folder / "loops.py").write_text(hangs + LOOPS)
    (place.folder / "start.py").write_text("import batchmaker.compiling as c\nc._ANSWER_S = 0.2\n" + START)
    own = place.start()
    assert sorted(place.compiled()) == [(name, own) for name in ALL]


@pytest.mark.slow
def test_where_no_process_can_be_begun_the_start_compiles_by_itself(place: Place) -> None:
    (place.folder / "start.py").write_text("import sys\nsys.executable = '/nothing/here'\n" + START)
    own = place.start()
    assert sorted(place.compiled()) == [(name, own) for name in ALL]


@pytest.mark.slow
def test_lines_that_a_process_prints_besides_do_no_harm(place: Place) -> None:
    (place.folder / "loops.py").write_text(
        "import os\nprint('hello' * ('BATCHMAKER_COMPILES' in os.environ))\n" + LOOPS
    )
    place.start()
    assert {name for name, _ in place.compiled()} == set(ALL)


@pytest.mark.slow
def test_processes_that_compile_begin_none(place: Place) -> None:
    own = place.start(BATCHMAKER_COMPILES="1")
    assert sorted(place.compiled()) == [(name, own) for name in ALL]


@pytest.mark.slow
def test_where_nothing_can_be_kept_every_start_compiles_by_itself(place: Place) -> None:
    (place.folder / "kept").write_text("a file where the folder would be")
    for _ in range(2):
        own = place.start()
        assert sorted(name for name, process in place.compiled() if process == own) == ALL


ENGINE: Final = """
import json, sys
import torch
from numba.core.dispatcher import Dispatcher
import batchmaker as bm
from batchmaker.compiled import CalledForms
import batchmaker.engine.engine as engine_module

class Model(bm.Model):
    example_request = [[0.0] * 4] * 2

    def __init__(self):
        self.step = bm.Cell(torch.nn.LSTMCell(4, 4), max_batch=4)

    def unfold(self, given):
        return self.step.run(given)

needs = []
import batchmaker.engine.setup as setup
ahead = setup.compiled_ahead
setup.compiled_ahead = lambda given, processes: (needs.extend(given), ahead(given, 1))[1]
with bm.Engine(Model(), threads=1) as engine:
    engine.map([[[0.0] * 4] * 3], progress=False)
loaded, compiled = [], []
for module_name, module in list(sys.modules.items()):
    for name, loop in list(vars(module).items()) if module_name.startswith("batchmaker.") else ():
        if isinstance(loop, Dispatcher) and loop.py_func.__module__ == module_name:
            loaded += [f"{module_name}.{name}"] * sum(loop.stats.cache_hits.values())
            compiled += [f"{module_name}.{name}"] * sum(loop.stats.cache_misses.values())
print(json.dumps([needs, sorted(loaded), sorted(compiled)]))
"""

LEARN: Final = """
import json, sys
from batchmaker.compiling import learnt
print(json.dumps(sorted(f"{module}.{name}" for module, name, _ in learnt(json.loads(sys.argv[1])).seen)))
"""


def test_a_start_needs_just_the_loops_that_are_compiled_ahead_and_each_in_one_form() -> None:
    """For an engine of a plain LSTM: what the processes are told to compile is what it loads, no less and no more."""
    for _ in range(2):  # the first may be the first of this installation
        done = subprocess.run([sys.executable, "-c", ENGINE], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        needs, loaded, compiled = json.loads(done.stdout)
        if not compiled:
            break
    assert compiled == []
    learnt = subprocess.run(
        [sys.executable, "-c", LEARN, json.dumps(needs)], env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert learnt.returncode == 0, learnt.stderr
    assert json.loads(learnt.stdout) == loaded
    assert len(set(loaded)) == len(loaded) == NUM_LOOPS


PARTS: Final = """
import collections, json
from numba.core import event
from batchmaker.kernels.cpu import first_calls

class Listener(event.Listener):
    def on_start(self, seen):
        loop = seen.data["dispatcher"].py_func
        if loop.__module__.startswith("batchmaker."):
            counted[f"{loop.__module__}.{loop.__qualname__}"] += 1

    def on_end(self, seen):
        pass

counted = collections.Counter()
event.register("numba:compile", Listener())
first_calls.float32()
print(json.dumps(counted))
"""


@pytest.mark.slow
def test_the_parts_of_recurrent_loops_are_compiled_in_one_form(tmp_path: Path) -> None:
    """A literal that one hands to another would make another form of it."""
    done = subprocess.run(
        [sys.executable, "-c", PARTS], env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout)
    assert counted["batchmaker.kernels.cpu.steps.run_steps"] == 1
    assert {name: count for name, count in counted.items() if count > 1} == {}
