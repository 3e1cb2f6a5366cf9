"""Ways to multiply a state by the recurrent weights without the interpreter: own loops, and what torch's library has.

PyTorch's wheels for x86 contain MKL in `libtorch_cpu.so` with visible C functions, and torch's `brgemm`, which calls
oneDNN where the processor has AVX-512 (on an EPYC 2.3 times as fast as MKL). They are looked up by name, tried
once on a small product, and not used if one is missing or wrong.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.arrays import Ints, aligned_zeros
from batchmaker.kernels.cpu.steps import (
    BF16,
    BF16_GEMM,
    BF16_WEIGHTS,
    BLOCK,
    BRGEMM,
    NUM_ADDRESSES,
    OWN,
    PACKED,
    PANEL,
    PANELS,
    SET_THREADS,
    SGEMM,
    TILED,
    TILES,
    WEIGHTS,
)
from batchmaker.kernels.cpu.tile_steps import fits_tiles, tiled

_ROW_MAJOR, _PLAIN, _TRANSPOSED, _PACKED, _B_MATRIX = 101, 111, 112, 151, 162  # of cblas.h and mkl_cblas.h
_PAGE: Final = 4096
_BRGEMM: Final = "_ZN2at6native7cpublas6brgemmEllllllbPKfS3_Pfb"
"""`at::native::cpublas::brgemm` of float32, as compilers for Linux name it."""


@final
@dataclass(frozen=True, slots=True)
class Library:
    """Functions of MKL, and torch's brgemm; None if this torch has none or a wrong one.

    brgemm: only where it calls oneDNN; elsewhere it calls MKL for each panel, which is slower than the packed product.
    """

    sgemm: Any = None
    bf16_gemm: Any = None
    pack: Any = None
    packed_size: Any = None
    set_threads: Any = None
    brgemm: Any = None

    @property
    def multiplies(self) -> bool:
        """Whether it has a product of float32."""
        return self.brgemm is not None or self.sgemm is not None

    @property
    def product(self) -> tuple[int, int, Any]:
        """The product of float32 that is used: its way, the place of its address, and the function."""
        return (PACKED, SGEMM, self.sgemm) if self.brgemm is None else (PANELS, BRGEMM, self.brgemm)


@cache
def library() -> Library:
    """Return the functions of torch's library."""
    try:
        loaded = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:  # another system's name, or another way of linking
        return Library()
    names = ("cblas_sgemm_compute", "cblas_gemm_bf16bf16f32", "cblas_sgemm_pack", "cblas_sgemm_pack_get_size")
    sgemm, bf16, pack, size = (getattr(loaded, name, None) for name in names)
    threads = getattr(loaded, "MKL_Set_Num_Threads_Local", None)
    functions = Library(sgemm, bf16, pack, size, threads)
    if threads is None:  # without it a product might use several threads
        functions = Library()
    elif None in (sgemm, pack, size) or not _multiplies(functions):
        functions = Library(None, bf16, None, None, threads)
    if bf16 is None or not torch.ops.mkldnn._is_mkldnn_bf16_supported() or not _multiplies_bf16(bf16):
        functions = replace(functions, bf16_gemm=None)
    brgemm = getattr(loaded, _BRGEMM, None)
    if brgemm is None or not _calls_onednn() or not _multiplies_panels(brgemm):
        return functions
    return replace(functions, brgemm=brgemm)


@final
class Products:
    """The recurrent weights [gates * hidden, hidden], float32 or bfloat16, prepared for every available way.

    w: [hidden, gates * hidden], bfloat16 as int16: as tiles if they fit and there are gates (`tiles`), else their
    transpose for own loops. ways: numbers of the ways. addresses: for the compiled loop's calls of the library; valid
    as long as this object lives.
    """

    def __init__(self, weights: Tensor, functions: Library, *, tiles: bool = True) -> None:
        weights = weights.detach()
        transposed = bits(weights.t().contiguous())
        self.addresses: Ints = np.zeros(NUM_ADDRESSES, np.int64)
        self._weights: list[Any] = []
        width, hidden = weights.shape
        if tiles and fits_tiles(hidden, width // hidden):
            self.w, self.ways = tiled(bits(weights.contiguous())), [TILED]
            self.addresses[TILES] = self.w.ctypes.data
        else:
            self.w, self.ways = transposed, [OWN]
        if weights.dtype == torch.float32 and functions.multiplies:
            prepared, address = prepare(transposed, functions)
            self._weights.append(prepared)
            way, call, function = functions.product
            self._use(way, call, function, WEIGHTS, address, functions)
        elif weights.dtype == torch.bfloat16 and functions.bf16_gemm is not None:
            rows = weights.contiguous()
            self._weights.append(rows)
            self._use(BF16, BF16_GEMM, functions.bf16_gemm, BF16_WEIGHTS, rows.data_ptr(), functions)

    def _use(self, way: int, call: int, function: Any, weights: int, address: int, functions: Library) -> None:
        self.ways.append(way)
        self.addresses[call] = address_of(function)
        self.addresses[weights] = address
        if functions.set_threads is not None:  # brgemm calls MKL, too, once oneDNN is switched off
            self.addresses[SET_THREADS] = address_of(functions.set_threads)


def prepare(w: NDArray[np.float32], functions: Library) -> tuple[NDArray[Any], int]:
    """Return w [depth, width] as the library's product of float32 reads it, and its address."""
    if functions.brgemm is None:
        return pack(w, functions)
    made = panels(w)
    return made, made.ctypes.data


def panels(w: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return w [depth, width] as panels of PANEL columns, one after the other."""
    depth, width = w.shape
    made = aligned_zeros((depth * width,), np.float32)
    for first in range(0, width, PANEL):
        panel = w[:, first : first + PANEL]
        made[depth * first : depth * first + panel.size] = panel.ravel()
    return made


def pack(w: NDArray[np.float32], functions: Library) -> tuple[NDArray[np.uint8], int]:
    """Return w [depth, width] packed by MKL for one thread and products of up to BLOCK rows, and its address."""
    depth, width = w.shape
    functions.packed_size.restype = ctypes.c_size_t
    threads = functions.set_threads(1)
    try:
        size = functions.packed_size(_B_MATRIX, BLOCK, width, depth)
        packed = np.zeros(size + _PAGE, np.uint8)
        address = -(-packed.ctypes.data // _PAGE) * _PAGE
        functions.pack(
            _ROW_MAJOR,
            _B_MATRIX,
            _PLAIN,
            BLOCK,
            width,
            depth,
            ctypes.c_float(1),
            _pointer(w),
            width,
            ctypes.c_void_p(address),
        )
    finally:
        functions.set_threads(threads)
    return packed, address


def bits(values: Tensor) -> NDArray[Any]:
    """Return the same memory as an array; bfloat16 as int16."""
    array: NDArray[Any] = (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy()
    return array


def _multiplies(functions: Library) -> bool:
    """Whether the packed product is right: for one row, for the number of rows given at packing, and in between."""
    random = np.random.default_rng(0)
    w = random.standard_normal((24, 40), np.float32)
    packed, address = pack(w, functions)
    for rows in (1, 7, BLOCK):
        a = random.standard_normal((rows, 24), np.float32)
        c = np.full((rows, 40), np.nan, np.float32)
        functions.sgemm(
            _ROW_MAJOR,
            _PLAIN,
            _PACKED,
            rows,
            40,
            24,
            _pointer(a),
            24,
            ctypes.c_void_p(address),
            40,
            ctypes.c_float(0),
            _pointer(c),
            40,
        )
        if not np.allclose(c, a @ w, atol=1e-4):
            return False
    return len(packed) > 0


def _calls_onednn() -> bool:
    """Whether brgemm calls oneDNN: the processor has AVX-512, and nobody has switched it off there."""
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "DEFAULT")).upper()
    may = most in ("DEFAULT", "ALL") or most.startswith(("AVX512", "AVX10"))
    enabled: bool = torch._C._get_mkldnn_enabled()
    return may and enabled and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _multiplies_panels(brgemm: Any) -> bool:
    """Whether brgemm is right, for one row and for several, between rows that are no neighbours."""
    random = np.random.default_rng(0)
    b = random.standard_normal((24, PANEL), np.float32)
    long, flag = ctypes.c_int64, ctypes.c_bool(False)
    for rows in (1, 7, 64):
        a, c = random.standard_normal((rows, 29), np.float32), np.full((rows, PANEL + 3), np.nan, np.float32)
        sizes = [long(size) for size in (rows, PANEL, 24, 29, PANEL, PANEL + 3)]
        brgemm(*sizes, flag, _pointer(a), _pointer(b), _pointer(c), flag)
        if not np.allclose(c[:, :PANEL], a[:, :24] @ b, atol=1e-4) or not np.isnan(c[:, PANEL:]).all():
            return False
    return True


def _multiplies_bf16(gemm: Any) -> bool:
    """Whether the product of bfloat16 matrices is right."""
    made = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, 24, generator=made, dtype=torch.float32).bfloat16() for rows in (7, 40))
    c = torch.full((7, 40), torch.nan, dtype=torch.float32)
    pointers = [ctypes.c_void_p(matrix.data_ptr()) for matrix in (a, b, c)]
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    gemm(_ROW_MAJOR, _PLAIN, _TRANSPOSED, 7, 40, 24, one, pointers[0], 24, pointers[1], 24, zero, pointers[2], 40)
    return torch.allclose(c, a.float() @ b.float().t(), atol=1e-4)


def address_of(function: Any) -> int:
    """Return the address of a function of the library, for compiled loops."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
