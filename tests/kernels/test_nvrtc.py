"""Kernels are compiled without a device, and what was compiled is found again."""

from __future__ import annotations

import sys

import pytest

from batchmaker.errors import DeviceError, OptionError
from batchmaker.kernels.cache import CacheDirectory, default_directory
from batchmaker.kernels.nvrtc import CachedCompiler, Compiled, Nvrtc, read_usage

SCALE = """
template <typename T, int W> __global__ void scale(T* out, const T* in, T by) {
    T kept[W];
#pragma unroll
    for (int i = 0; i < W; ++i) kept[i] = in[i * blockDim.x + threadIdx.x];
    for (int step = 0; step < 100; ++step) {
#pragma unroll
        for (int i = 0; i < W; ++i) kept[i] = kept[i] * kept[(i + step) % W ? i : 0] + by;
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < W; ++i) out[i * blockDim.x + threadIdx.x] = kept[i];
}
"""


class CountingCompiler:
    """Compiles nothing, and counts how often it was asked."""

    def __init__(self, version: str = "1.0") -> None:
        self.version = version
        self.asked = 0

    def compile(self, source: str, name_expression: str, arch: str) -> Compiled:
        self.asked += 1
        return Compiled(arch, source.encode(), f"_{name_expression}", 32, 0, self.asked)


@pytest.fixture
def compiler():
    return CountingCompiler()


def cached(compiler, folder):
    return CachedCompiler(compiler, CacheDirectory(folder))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a"])
def test_a_template_is_compiled_to_machine_code(arch):
    compiled = Nvrtc().compile(SCALE, "scale<float, 4>", arch)
    assert compiled.cubin[:4] == b"\x7fELF"
    assert compiled.symbol.encode() in compiled.cubin
    assert compiled.arch == arch
    assert 4 <= compiled.registers <= 255
    assert compiled.spill_bytes == 0


@pytest.mark.slow
def test_a_kernel_with_more_values_than_registers_spills():
    compiled = Nvrtc().compile(SCALE, "scale<float, 300>", "sm_90")
    assert compiled.registers == 255
    assert compiled.spill_bytes > 0


def test_what_does_not_compile_is_told_with_the_log():
    with pytest.raises(
        DeviceError, match=r"scale<float, 4> does not compile for sm_90(.|\n)*identifier \"y\" is undef"
    ):
        Nvrtc().compile(SCALE.replace("+ by", "+ y"), "scale<float, 4>", "sm_90")


def test_an_unknown_architecture_is_refused_with_those_that_are_known():
    with pytest.raises(OptionError, match=r"does not know arch 'sm_12'; known: .*sm_80, .*sm_90"):
        Nvrtc().compile(SCALE, "scale<float, 4>", "sm_12")


def test_without_the_extra_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(DeviceError, match=r"pip install 'batchmaker\[cuda\]'"):
        Nvrtc()


def test_registers_spills_and_shared_memory_are_read_from_the_log():
    older = """ptxas info    : Compiling entry function '_Z1k' for 'sm_90'
ptxas info    : Function properties for _Z1k
    528 bytes stack frame, 524 bytes spill stores, 520 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 528 bytes cumulative stack size, 256 bytes smem"""
    usage = read_usage(older)
    assert (usage.registers, usage.spill_bytes, usage.shared_bytes) == (255, 1044, 256)
    with pytest.raises(DeviceError, match="does not say how many registers"):
        read_usage("nothing")


def test_what_was_compiled_is_found_on_disk(compiler, tmp_path):
    first = cached(compiler, tmp_path / "new" / "folder").compile("source", "k<1>", "sm_90")
    again = cached(compiler, tmp_path / "new" / "folder").compile("source", "k<1>", "sm_90")
    assert again == first
    assert compiler.asked == 1


@pytest.mark.parametrize("changed", [{"source": "other"}, {"name_expression": "k<2>"}, {"arch": "sm_80"}])
def test_anything_else_is_compiled(compiler, tmp_path, changed):
    kernel = {"source": "source", "name_expression": "k<1>", "arch": "sm_90"}
    cached(compiler, tmp_path).compile(**kernel)
    cached(compiler, tmp_path).compile(**{**kernel, **changed})
    assert compiler.asked == 2


def test_another_version_of_the_compiler_compiles_again(compiler, tmp_path):
    cached(compiler, tmp_path).compile("source", "k<1>", "sm_90")
    newer = CountingCompiler("1.1")
    cached(newer, tmp_path).compile("source", "k<1>", "sm_90")
    assert newer.asked == 1


@pytest.mark.parametrize("damage", [lambda entry: entry[:-3], lambda entry: b"", lambda entry: entry[:40] + b"!" * 40])
def test_a_damaged_entry_is_compiled_again_and_replaced(compiler, tmp_path, damage):
    cached(compiler, tmp_path).compile("source", "k<1>", "sm_90")
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(damage(entry.read_bytes()))
    again = cached(compiler, tmp_path)
    assert again.compile("source", "k<1>", "sm_90").cubin == b"source"
    assert (compiler.asked, again.num_compiled) == (2, 1)
    cached(compiler, tmp_path).compile("source", "k<1>", "sm_90")
    assert compiler.asked == 2
    assert len(list(tmp_path.iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_one_warning(compiler, tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder", encoding="utf-8")
    lost = cached(compiler, tmp_path / "file" / "cache")
    for number in (1, 2):
        assert lost.compile("source", f"k<{number}>", "sm_90").cubin == b"source"
    assert len(caplog.records) == 1
    assert "the cache cannot be written (Not a directory)" in caplog.text


def test_no_directory_keeps_nothing(compiler):
    for _ in range(2):
        cached(compiler, None).compile("source", "k<1>", "sm_90")
    assert compiler.asked == 2


def test_the_default_directory_follows_xdg():
    assert str(default_directory({"XDG_CACHE_HOME": "/caches", "HOME": "/home/me"})) == "/caches/batchmaker"
    assert str(default_directory({"XDG_CACHE_HOME": "caches", "HOME": "/home/me"})) == "/home/me/.cache/batchmaker"
    assert default_directory({}) is None
