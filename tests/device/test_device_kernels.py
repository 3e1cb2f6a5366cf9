"""The kernels of the device core compile for every supported architecture, within bounds."""

from __future__ import annotations

import pytest

from covering import covering

pytest.importorskip("cuda.core", reason="needs the extra `cuda`")

from batchmaker.device.core import KERNELS, source
from batchmaker.kernels.nvrtc import Nvrtc


@pytest.mark.parametrize(("name", "arch"), covering(KERNELS, ["sm_80", "sm_90"]))
def test_they_compile_without_spills(name: str, arch: str) -> None:
    compiled = Nvrtc().compile(source(), name, arch)
    assert compiled.spill_bytes == 0
    assert compiled.registers <= 64
