"""The executor's own two kernels: they compile for every supported architecture, within bounds."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.core", reason="needs the extra `cuda`")

from batchmaker.executor.cuda.gpu import row_kernels
from batchmaker.kernels.nvrtc import Nvrtc


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", ["move_rows", "signal_end"])
def test_they_compile_without_spills(name: str, arch: str) -> None:
    compiled = Nvrtc().compile(row_kernels(), name, arch)
    assert compiled.spill_bytes == 0
    assert compiled.registers <= 40
