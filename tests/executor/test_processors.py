"""The processors that a process may use, found in folders that look like those of the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmaker.executor.processors import Processors, cgroup_quota, default_threads, found_processors

V1, V2 = "cgroup", "cgroup2"


class Kernel:
    """A process's folder, and mounts of cgroups, beneath one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = folder / "proc"
        self.process.mkdir()
        self.mounts: list[str] = ["22 1 0:20 / /proc rw,relatime - proc proc rw"]

    def mount(self, kind: str, root: str = "/", name: str = "sys fs", options: str = "rw") -> Path:
        """Mount the cgroup `root` and those in it; return the folder."""
        point = self.folder / name
        point.mkdir()
        at = str(point).replace(" ", "\\040")
        self.mounts.append(f"30 22 0:26 {root} {at} rw,nosuid shared:9 master:2 - {kind} cgroup {options}")
        (self.process / "mountinfo").write_text("\n".join(self.mounts) + "\n")
        return point

    def belongs_to(self, *lines: str) -> None:
        (self.process / "cgroup").write_text("\n".join(lines) + "\n")

    @property
    def quota(self) -> float | None:
        return cgroup_quota(self.process)


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def limit(folder: Path, quota: int | str, period: int = 100_000, *, kind: str = V2) -> None:
    """Write a cgroup's limit as the kernel shows it."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == V2:
        (folder / "cpu.max").write_text(f"{quota} {period}\n")
    else:
        (folder / "cpu.cfs_quota_us").write_text(f"{-1 if quota == 'max' else quota}\n")
        (folder / "cpu.cfs_period_us").write_text(f"{period}\n")


@pytest.mark.parametrize(("kind", "line"), [(V2, "0::/a/b/c"), (V1, "4:cpu,cpuacct:/a/b/c")])
def test_the_least_quota_on_the_way_to_the_root_counts(kernel, kind, line):
    top = kernel.mount(kind, options="rw,cpu,cpuacct")
    kernel.belongs_to("12:memory:/elsewhere", line)
    assert kernel.quota is None
    limit(top / "a" / "b" / "c", 400_000, kind=kind)
    assert kernel.quota == 4.0
    limit(top / "a", 125_000, 50_000, kind=kind)
    assert kernel.quota == 2.5
    limit(top, "max", kind=kind)
    limit(top / "a" / "b", "max", kind=kind)
    assert kernel.quota == 2.5
    limit(top, 50_000, kind=kind)
    assert kernel.quota == 0.5
    limit(top / "a" / "other", 1_000, kind=kind)
    assert kernel.quota == 0.5


@pytest.mark.parametrize(("kind", "line"), [(V2, "0::/docker/abc/x"), (V1, "4:cpu:/docker/abc/x")])
def test_in_a_container_that_sees_only_its_own_cgroup_paths_are_relative_to_it(kernel, kind, line):
    top = kernel.mount(kind, root="/docker/abc", options="rw,cpu")
    kernel.belongs_to(line)
    limit(top, 300_000, kind=kind)
    assert kernel.quota == 3.0
    limit(top / "x", 100_000, kind=kind)
    assert kernel.quota == 1.0


@pytest.mark.parametrize("path", ["/elsewhere/y", "/../../system.slice", "/docker/abc/../.."])
def test_of_a_cgroup_that_cannot_be_seen_the_mounted_one_is_read(kernel, path):
    limit(kernel.mount(V2, root="/docker/abc"), 300_000)
    kernel.belongs_to(f"0::{path}")
    assert kernel.quota == 3.0


def test_both_versions_side_by_side_are_read(kernel):
    old = kernel.mount(V1, name="cpu", options="rw,cpu")
    new = kernel.mount(V2, name="unified")
    limit(kernel.mount(V1, name="memory", options="rw,memory"), 1_000, kind=V1)
    kernel.belongs_to("3:memory:/", "2:cpu:/pod", "0::/pod")
    limit(new / "pod", "max")
    limit(old / "pod", 200_000, kind=V1)
    assert kernel.quota == 2.0
    limit(new / "pod", 150_000)
    assert kernel.quota == 1.5


@pytest.mark.parametrize(
    "text", ["", "max", "max 100000", "x y", "-5 100000", "0 100000", "5 0", "1 2 3", "\xff\xfe 3", "100000"]
)
def test_a_limit_that_is_none_or_cannot_be_read_is_none(kernel, text):
    (kernel.mount(V2) / "cpu.max").write_bytes(text.encode("latin-1"))
    kernel.belongs_to("0::/")
    assert kernel.quota is None


@pytest.mark.parametrize("name", ["cgroup", "mountinfo"])
@given(content=st.binary(max_size=200))
def test_whatever_the_kernel_writes_is_no_error(tmp_path_factory, name, content):
    kernel = Kernel(tmp_path_factory.mktemp("kernel"))
    limit(kernel.mount(V2), 200_000)
    kernel.belongs_to("0::/")
    (kernel.process / name).write_bytes(content)
    assert kernel.quota in (None, 2.0)


def test_where_there_is_no_kernel_to_ask_there_is_no_quota(tmp_path):
    assert cgroup_quota(tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("processors", "workers", "threads", "said"),
    [
        (Processors(16, 16), 1, 15, "15 compute threads: the process may use 16 processors of 16"),
        (Processors(16, 4), 1, 3, "3 compute threads: the process may use 4 processors of 16"),
        (Processors(16, 16, 2.5), 1, 2, "2 compute threads: the cgroup's quota is 2.5 processors of 16"),
        (Processors(16, 16, 4.0), 1, 3, "3 compute threads: the cgroup's quota is 4 processors of 16"),
        (Processors(16, 16, 0.2), 1, 1, "1 compute thread: the cgroup's quota is 0.2 processors of 16"),
        (Processors(16, 4, 8.0), 1, 3, "3 compute threads: the process may use 4 processors of 16"),
        (Processors(9, 8, 6), 2, 2, "2 compute threads for each of 2 workers: the cgroup's quota is 6 processors of 8"),
        (Processors(16, 16, 2.5, 3), 1, 3, "3 compute threads: OMP_NUM_THREADS is 3"),
        (Processors(16, 16, None, 2), 4, 2, "2 compute threads for each of 4 workers: OMP_NUM_THREADS is 2"),
        (Processors(2, 2), 99, 1, "1 compute thread for each of 99 workers: the process may use 2 processors of 2"),
    ],
)  # fmt: skip
def test_threads_leave_a_processor_and_stay_within_what_is_allowed(processors, workers, threads, said):
    assert processors.threads(workers) == threads
    assert processors.explained(workers) == said


def test_threads_that_somebody_chose_are_told_too():
    assert Processors(16, 16, 2.5).explained(1, 4) == "4 compute threads: the settings say so"


@pytest.mark.parametrize(
    ("text", "threads"), [("3", 3), ("4,2", 4), (" 2 ", 2), ("0", None), ("-1", None), ("many", None), ("", None)]
)
def test_omp_num_threads_is_respected_if_it_is_a_number(kernel, text, threads):
    assert found_processors(kernel.process, {"OMP_NUM_THREADS": text}).omp_threads == threads


def test_engines_of_this_process_have_what_it_may_use(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert default_threads(3) == 7
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert default_threads() == max(1, found_processors().usable - 1)
    assert default_threads(10_000) == 1
