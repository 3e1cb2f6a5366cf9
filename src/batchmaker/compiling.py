"""Compiles loops in several processes before a start needs them, which is long at the first start of an installation.

What is needed is named by functions that call every loop once, such as `core/warm_up.py`. One process runs them as
Python code, which takes no time, and notes which loops are called with which types. Other processes compile these, a
module at a time. They keep the machine code where every process looks for it, so the start, which calls the same
functions, only loads it. What a process fails to compile, the start compiles itself.

The processes run this module in a new interpreter, not the user's script, and import no torch.
"""

from __future__ import annotations

import base64
import gc
import importlib
import json
import os
import pickle
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import reduce
from hashlib import blake2b
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final, final

import numba
from numba.core.registry import cpu_target

from batchmaker.compiled import CalledForms, config, kept_in

MOST_PROCESSES: Final = 6
"""More would wait for the largest loop, which one process compiles."""

_ANSWER_S: Final = 300.0
"""Seconds after which a process that has not answered is ended. The largest loop takes ten, on a busy machine more."""

_INSIDE: Final = "BATCHMAKER_COMPILES"
"""Set in the environment of the processes, which begin none themselves, whatever `sys.executable` is."""

_ENTRY: Final = """
import json, sys
given = json.loads(sys.stdin.readline())
sys.path[:] = given["path"]
from batchmaker.compiling import compile_what_is_told, tell_forms
tell_forms(given["needs"]) if given["needs"] else compile_what_is_told()
"""


@contextmanager
def compiled_ahead(needs: Sequence[str], processes: int) -> Iterator[None]:
    """Compile what these functions call, unless it is kept. The caller calls them within; after that it is kept.

    needs: "module:function", without arguments; modules that need no torch. processes: how many may compile at once.
    With one, or if nothing can be kept, nothing is compiled here: the functions do it themselves.
    """
    folder = None if config.DISABLE_JIT else kept_in()
    marks = {} if folder is None else {need: _mark(folder, need) for need in needs}
    missing = [need for need, mark in marks.items() if not mark.exists()]
    can_begin = processes > 1 and sys.executable and not getattr(sys, "frozen", False) and _INSIDE not in os.environ
    if missing and can_begin:
        _compile(missing, min(processes, MOST_PROCESSES))
    yield
    for need in missing:
        with suppress(OSError):
            marks[need].touch()


def _mark(folder: Path, need: str) -> Path:
    """Return the file that says that the machine code of all that this function calls is kept."""
    known_by = (sys.implementation.cache_tag, numba.__version__, cpu_target.target_context.codegen().magic_tuple())
    return folder / f"all-{blake2b(repr((known_by, need)).encode(), digest_size=8).hexdigest()}"


def _compile(needs: Sequence[str], processes: int) -> None:
    begun: list[_Process] = []
    try:
        learner = _Process(needs)
        begun.append(learner)
        begun.extend(_Process() for _ in range(processes - 1))  # they make themselves ready meanwhile
        parts: list[Any] = list(json.loads(learner.ask("") or "[]"))
        learner.end()
        begun[0] = _Process()
        parts.reverse()
        threads = [threading.Thread(target=_serve, args=(process, parts), daemon=True) for process in begun]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except (OSError, ValueError, TypeError):  # no process can be begun; what every interpreter runs first prints lines
        pass
    finally:
        for process in begun:
            process.end()


def _serve(process: _Process, parts: list[Any]) -> None:
    """Give a process one part after the other, from the end of the list, while it compiles them."""
    while True:
        try:
            part = parts.pop()
        except IndexError:
            return
        if not process.ask(json.dumps(part)):
            return


@final
class _Process:
    """A process that learns what is needed, or compiles if nothing is given."""

    def __init__(self, needs: Sequence[str] = ()) -> None:
        settings = {"NUMBA_CACHE_DIR": config.CACHE_DIR, "NUMBA_BOUNDSCHECK": config.BOUNDSCHECK}
        settings |= {"NUMBA_DISABLE_JIT": int(bool(needs)), _INSIDE: 1}
        settings |= {"NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING": 1}  # of the messages that numba makes for itself
        environment = {name: str(value) for name, value in settings.items() if value is not None}
        self._process = subprocess.Popen(
            [sys.executable, "-I", *["-B"] * sys.dont_write_bytecode, "-c", _ENTRY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **environment},
            text=True,
        )
        self._tell({"path": [os.path.abspath(place) for place in sys.path], "needs": list(needs)})

    def ask(self, line: str) -> str:
        """Return the answer to a line; "" if the process has ended, or takes too long and is ended."""
        limit = threading.Timer(_ANSWER_S, self._process.kill)
        limit.daemon = True
        limit.start()
        try:
            self._write(line)
            assert self._process.stdout is not None
            return self._process.stdout.readline()
        finally:
            limit.cancel()

    def _tell(self, message: dict[str, Any]) -> None:
        self._write(json.dumps(message))

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def end(self) -> None:
        """End the process at once: what it has compiled is kept."""
        self._process.kill()
        with suppress(OSError, ValueError):  # the thread that asks may be reading still
            self._process.communicate()


# --- in the processes ----------------------------------------------------------------------------------------------


def learnt(needs: Sequence[str]) -> CalledForms:
    """Return the forms of what these functions call. Their modules have not been imported before."""
    forms = CalledForms()
    forms.learn()
    for need in needs:
        module, _, path = need.partition(":")
        reduce(getattr, path.split("."), importlib.import_module(module))()  # type: ignore[operator]
    return forms


def tell_forms(needs: Sequence[str]) -> None:
    """Print the parts of the work, the longest first: loops of one module, each with its form."""
    forms = learnt(needs)
    parts: defaultdict[str, list[tuple[str, Any]]] = defaultdict(list)
    sizes: defaultdict[str, int] = defaultdict(int)
    for (module, name, form), loop in forms.seen.items():
        parts[module].append((name, form))
        sizes[module] += _size(loop)
    print(
        json.dumps(
            [
                (module, base64.b64encode(pickle.dumps(parts[module])).decode())
                for module in sorted(parts, key=sizes.__getitem__, reverse=True)
            ]
        ),
        flush=True,
    )


def compile_what_is_told() -> None:
    """Compile the parts that are read, and print a line after each. Compiling makes few reference cycles that last."""
    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    for line in sys.stdin:
        module, loops = json.loads(line)
        for name, form in pickle.loads(base64.b64decode(loops)):
            getattr(importlib.import_module(module), name).compile(form)
        print("compiled", flush=True)


def _size(loop: Callable[..., Any]) -> int:
    """Return the bytes of bytecode of a loop and of all functions of this package that it calls, each counted once."""
    sizes: dict[CodeType, int] = {}
    waiting: list[Any] = [loop]
    while waiting:
        function = waiting.pop()
        function = getattr(function, "__wrapped__", function)
        if not isinstance(function, FunctionType) or function.__code__ in sizes:
            continue
        code, namespace = function.__code__, function.__globals__
        sizes[code] = len(code.co_code)
        used = [namespace[name] for name in code.co_names if name in namespace]
        rooms = [room for room in used if isinstance(room, ModuleType) and room.__name__.startswith("batchmaker.")]
        waiting += [one for one in used if getattr(one, "__module__", "").startswith("batchmaker.")]
        waiting += [getattr(room, name) for room in rooms for name in code.co_names if hasattr(room, name)]
    return sum(sizes.values())
