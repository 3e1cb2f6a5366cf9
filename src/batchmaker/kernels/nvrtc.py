"""Compiles kernels with NVRTC to machine code of one architecture. Needs no nvcc, no driver and no device."""

from __future__ import annotations

import hashlib
import io
import re
from dataclasses import dataclass
from typing import Any, Final, Protocol, final

import msgspec

from batchmaker.errors import DeviceError, OptionError, needing
from batchmaker.kernels.cache import CacheDirectory

OPTIONS: Final = {"std": "c++17", "ptxas_options": "-v", "no_cache": True}
"""Options for every kernel. With -v the assembler reports used registers and spills; what NVRTC has in a cache of its
own it does not assemble, and says nothing of it."""
_FORMAT: Final = 1
"""Version of the cache entries. Entries of another version are compiled again."""


@final
@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel as machine code.

    cubin: can be loaded by a driver. symbol: the kernel's mangled name in it. registers: of one thread. spill_bytes:
    bytes that a thread stores to local memory and loads from it for lack of registers, counted once in the code.
    shared_bytes: shared memory of a block that is declared in the source, without the shared memory requested at the
    launch.
    """

    arch: str
    cubin: bytes
    symbol: str
    registers: int
    spill_bytes: int
    shared_bytes: int


class KernelCompiler(Protocol):
    """Makes kernels from source."""

    @property
    def version(self) -> str:
        """The compiler's identity: another version may produce other code."""

    def compile(self, source: str, name_expression: str, arch: str) -> Compiled:
        """Return one instance of a kernel template, such as `scale<float, 4>`, for `arch`, such as `sm_90`.

        DeviceError with the compiler's log if it refuses; OptionError for an unknown architecture.
        """


@final
class Nvrtc:
    """NVIDIA's run-time compiler. DeviceError that names the extra if it is not installed."""

    __slots__ = ("_bindings", "_core")

    def __init__(self) -> None:
        self._core, self._bindings = _modules()

    @property
    def version(self) -> str:
        _, major, minor = self._bindings.nvrtcVersion()
        return f"{major}.{minor}"

    @property
    def architectures(self) -> tuple[str, ...]:
        """The architectures that it supports, without variants such as sm_90a."""
        _, numbers = self._bindings.nvrtcGetSupportedArchs()
        return tuple(f"sm_{number}" for number in numbers)

    def compile(self, source: str, name_expression: str, arch: str) -> Compiled:
        """Compile one instance of the source for `arch`.

        DeviceError with the compiler's log if it refuses, OptionError for an unknown architecture. Each call compiles;
        see CachedCompiler.
        """
        if re.sub(r"[af]$", "", arch) not in self.architectures:
            raise OptionError(
                f"NVRTC {self.version} does not know arch {arch!r}; known: {', '.join(self.architectures)}"
            )
        log = io.StringIO()
        options = self._core.ProgramOptions(arch=arch, **OPTIONS)
        try:
            program = self._core.Program(source, "c++", options)
            built = program.compile("cubin", name_expressions=(name_expression,), logs=log)
        except Exception as error:  # its error classes are not public
            raise DeviceError(f"{name_expression} does not compile for {arch}: {error}") from error
        usage = read_usage(log.getvalue())
        symbol = built.symbol_mapping[name_expression]
        symbol = symbol.decode() if isinstance(symbol, bytes) else str(symbol)
        return Compiled(arch, bytes(built.code), symbol, usage.registers, usage.spill_bytes, usage.shared_bytes)


@final
@dataclass(frozen=True, slots=True)
class Usage:
    """The assembler's report on a kernel; see Compiled."""

    registers: int
    spill_bytes: int
    shared_bytes: int


def read_usage(log: str) -> Usage:
    """Return the content of the log of one kernel, assembled with -v. Called functions are included.

    DeviceError if it does not mention registers.
    """
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", log)]
    if not registers:
        raise DeviceError(f"the assembler's log does not say how many registers the kernel uses: {log.strip()!r}")
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    shared = re.findall(r"(\d+) bytes smem", log)
    return Usage(max(registers), sum(map(int, spills)), max(map(int, shared), default=0))


@final
class CachedCompiler:
    """Compiles each kernel once; later requests are read from disk.

    An entry is found by the hash of source, options, name expression, architecture and compiler version. A damaged
    entry is compiled again and replaced. `num_compiled` counts the compilations.
    """

    __slots__ = ("_cache", "_compiler", "num_compiled")

    def __init__(self, compiler: KernelCompiler, cache: CacheDirectory) -> None:
        self._compiler = compiler
        self._cache = cache
        self.num_compiled = 0

    @property
    def version(self) -> str:
        return self._compiler.version

    def compile(self, source: str, name_expression: str, arch: str) -> Compiled:
        """Return the instance from the cache; compile and store it if it is not there.

        Raises the errors of the compiler.
        """
        parts = (str(_FORMAT), self.version, arch, repr(OPTIONS), name_expression, source)
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        cached = _decoded(self._cache.read(f"{key}.kernel"))
        if cached is not None:
            return cached
        self.num_compiled += 1
        compiled = self._compiler.compile(source, name_expression, arch)
        self._cache.write(f"{key}.kernel", _encoded(compiled))
        return compiled


def _encoded(compiled: Compiled) -> bytes:
    body = msgspec.msgpack.encode(compiled)
    return hashlib.sha256(body).digest() + body


def _decoded(entry: bytes | None) -> Compiled | None:
    """Return the content of an entry, None if there is none or it is damaged."""
    if entry is None or hashlib.sha256(entry[32:]).digest() != entry[:32]:
        return None
    try:
        return msgspec.msgpack.decode(entry[32:], type=Compiled)
    except msgspec.MsgspecError:
        return None


def _modules() -> tuple[Any, Any]:
    with needing("cuda", "Compiling for a GPU", DeviceError):
        import cuda.core
        from cuda.bindings import nvrtc

        try:
            nvrtc.nvrtcVersion()
        except RuntimeError as error:  # the compiler's library, a package of its own, is missing
            raise ImportError(str(error)) from error
    return cuda.core, nvrtc
