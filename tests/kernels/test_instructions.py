"""What becomes of the kernel's instructions in PTX: the emulation takes their place, so it cannot tell."""

from __future__ import annotations

import pytest

from batchmaker.kernels.source import kernel_source
from batchmaker.kernels.template import KernelConfig

GRID = KernelConfig("lstm", "float32", "grid", 64, 2, 4, 4, 16, 4)
CLUSTER = KernelConfig("lstm", "float32", "cluster", 64, 2, 4, 4, 16, 4)
BFLOAT16 = KernelConfig("gru", "bfloat16", "grid", 64, 16, 8, 1, 64, 8)
FLOAT16 = KernelConfig("lstm", "float16", "block", 32, 8, 8, 4, 32, 8)


def ptx(config: KernelConfig) -> str:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cuda")
    _, program = nvrtc.nvrtcCreateProgram(kernel_source().encode(), b"recurrent.cu", 0, [], [])
    nvrtc.nvrtcAddNameExpression(program, config.name_expression.encode())
    (result,) = nvrtc.nvrtcCompileProgram(program, 2, [b"-arch=compute_90", b"-std=c++17"])
    assert result == nvrtc.nvrtcResult.NVRTC_SUCCESS
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = b" " * size
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    return text.decode()


def test_the_grid_barrier_releases_and_acquires_at_gpu_scope():
    text = ptx(GRID)
    release, acquire = text.index("red.release.gpu.global.add.u32"), text.index("ld.acquire.gpu.global.u32")
    assert "bar.sync" in text[:release]
    assert release < acquire
    assert "bar.sync" in text[acquire:]
    assert "barrier.cluster" not in text


def test_exchanged_values_never_come_through_the_read_only_cache():
    """It need not see what other blocks write while the kernel runs."""
    after_first_wait = ptx(GRID).split("ld.acquire.gpu", 1)[1]
    assert "ld.global.cg.v4.u32" in after_first_wait
    assert "ld.global.nc.v4" not in after_first_wait


def test_clusters_write_to_their_peers_between_their_barriers():
    text = ptx(CLUSTER)
    assert "mapa.shared::cluster.u32" in text
    assert "st.shared::cluster.f32" in text
    assert text.count("barrier.cluster.arrive.release") >= 2
    assert text.count("barrier.cluster.wait.acquire") == text.count("barrier.cluster.arrive.release")
    assert "red.release" not in text


@pytest.mark.parametrize(("config", "kind"), [(BFLOAT16, "bf16"), (FLOAT16, "f16")])
def test_sixteen_bit_products_run_on_tensor_workers(config, kind):
    text = ptx(config)
    assert f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32" in text
    assert f"cvt.rn.{kind}.f32" in text


def test_float32_products_are_true_fused_multiply_adds():
    text = ptx(GRID)
    assert "fma.rn.f32" in text
    assert "mma" not in text
    assert "tf32" not in text
