"""Limits of control groups, versions 1 and 2: read from trees as containers have them, and from the
kernel where this account may create a group."""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swell.configs.runtime.cgroups import CpuQuota, MemoryLimit, cpu_quota, memory_limit
from swell.configs.runtime.process import available_cores, available_memory_bytes
from swell.configs.runtime.promised_memory import Promised, promised_bytes
from tests.support.deadlines import HANG_S

GIB = 2**30
V1_NO_LIMIT = "9223372036854771712"
V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup ro,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "3{n} 31 0:3{n} {root} /sys/fs/cgroup/{name} ro - cgroup cgroup rw,{name}\n"


class Machine:
    """A folder that stands for `/`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: 33554432 kB\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def v2(self, path: str, root: str = "/") -> None:
        self.write("proc/self/cgroup", f"0::{path}\n")
        self.write("proc/self/mountinfo", V2_MOUNT.format(root=root))

    def v1(self, path: str, root: str = "/") -> None:
        self.write("proc/self/cgroup", f"4:memory:{path}\n3:cpu,cpuacct:{path}\n1:name=systemd:/\n")
        mounts = [V1_MOUNT.format(n=n, name=name, root=root) for n, name in ((1, "memory"),)]
        mounts.append(V1_MOUNT.format(n=2, name="cpu,cpuacct", root=root))
        self.write("proc/self/mountinfo", "".join(mounts))

    def v2_memory(self, folder: str, limit: str, used: int, cached: int = 0) -> None:
        group = f"sys/fs/cgroup/{folder}"
        self.write(f"{group}/memory.max", f"{limit}\n")
        self.write(f"{group}/memory.current", f"{used}\n")
        stat = f"anon {used - cached}\nfile {cached}\nactive_file 0\ninactive_file {cached}\n"
        self.write(f"{group}/memory.stat", stat)

    def v1_memory(self, folder: str, limit: str, used: int, cached: int = 0) -> None:
        group = f"sys/fs/cgroup/memory/{folder}"
        self.write(f"{group}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{group}/memory.usage_in_bytes", f"{used}\n")
        stat = f"active_file 0\ntotal_active_file {cached}\ntotal_inactive_file 0\n"
        self.write(f"{group}/memory.stat", stat)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_machine_without_cgroups_has_the_limits_of_the_kernel(machine: Machine) -> None:
    assert memory_limit(machine.root) is None and cpu_quota(machine.root) is None
    assert available_memory_bytes(machine.root) == 32 * GIB
    assert available_cores(machine.root) == len(os.sched_getaffinity(0))


def test_memory_that_workers_will_write_is_not_available(machine: Machine) -> None:
    """Two processes have announced four and three pages, and have written two and one of them. The
    page map of another one cannot be read, and its announcement counts whole. One more has given
    its memory back already. The limit of a control group is that of its own processes."""
    page = os.sysconf("SC_PAGE_SIZE")
    present, swapped, neither = 1 << 63 | 77, 1 << 62, 1 << 55

    def announce(process: str, first: int, pages: int, page_map: list[int] | None) -> None:
        folder = machine.root / "proc" / process
        (folder / "fd").mkdir(parents=True)
        (folder / "fd/0").symlink_to("/dev/null")
        limits = f"{first * page:x}-{(first + pages) * page:x}"
        (folder / "fd/5").symlink_to(f"/memfd:swell-memory:{limits} (deleted)")
        (folder / "cgroup").write_text("0::/other\n" if process == "12" else "0::/\n")
        if page_map is not None:
            (folder / "pagemap").write_bytes(struct.pack(f"<{len(page_map)}Q", *page_map))

    announce("7", 2, 4, [present, present, swapped, neither, present, 0, present, present])
    announce("12", 1, 3, [0, present, 0, 0])
    announce("31", 0, 5, None)
    announce("32", 0, 5, [])
    (machine.root / "proc/99").mkdir()
    machine.v2("/")
    assert promised_bytes(machine.root) == Promised(9 * page, 7 * page)
    assert available_memory_bytes(machine.root) == 32 * GIB - 9 * page
    machine.v2_memory("", str(4 * GIB), 3 * GIB)
    assert available_memory_bytes(machine.root) == GIB - 7 * page


def test_limits_of_a_cgroup_v2_container(machine: Machine) -> None:
    """In a container of version 2, the namespace shows the container's own group as the root."""
    machine.v2("/")
    machine.v2_memory("", str(4 * GIB), 3 * GIB, cached=GIB)
    machine.write("sys/fs/cgroup/cpu.max", "150000 100000\n")
    found = memory_limit(machine.root)
    assert found == MemoryLimit(4 * GIB, 2 * GIB, "/sys/fs/cgroup/memory.max")
    assert available_memory_bytes(machine.root) == 2 * GIB
    assert cpu_quota(machine.root) == CpuQuota(1.5, "/sys/fs/cgroup/cpu.max")
    assert available_cores(machine.root) == 1


def test_limits_of_a_cgroup_v1_container(machine: Machine) -> None:
    """In a container of version 1, Docker mounts the container's own group and names it by its path
    on the host."""
    machine.v1("/docker/ab", root="/docker/ab")
    machine.v1_memory("", str(4 * GIB), 3 * GIB, cached=GIB)
    machine.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "100000\n")
    machine.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "50000\n")
    found = memory_limit(machine.root)
    assert found == MemoryLimit(4 * GIB, 2 * GIB, "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    quota = cpu_quota(machine.root)
    assert quota == CpuQuota(2.0, "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us")


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_parent_group_counts(machine: Machine, version: int) -> None:
    """The tightest group among all ancestors counts. A pod has a limit of its own above those of
    its containers, and other containers use it, too."""
    no_limit = V1_NO_LIMIT if version == 1 else "max"
    (machine.v1 if version == 1 else machine.v2)("/pod/app")
    write = machine.v1_memory if version == 1 else machine.v2_memory
    write("", no_limit, 60 * GIB)
    write("pod", str(8 * GIB), 7 * GIB)
    write("pod/app", str(6 * GIB), 2 * GIB)
    found = memory_limit(machine.root)
    assert found is not None and (found.limit_bytes, found.available_bytes) == (8 * GIB, GIB)


@pytest.mark.parametrize("version", [1, 2])
def test_a_missing_limit_means_unlimited(machine: Machine, version: int) -> None:
    (machine.v1 if version == 1 else machine.v2)("/")
    if version == 1:
        machine.v1_memory("", V1_NO_LIMIT, GIB)
        machine.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n")
        machine.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    else:
        machine.v2_memory("", "max", GIB)
        machine.write("sys/fs/cgroup/cpu.max", "max 100000\n")
    assert memory_limit(machine.root) is None and cpu_quota(machine.root) is None
    assert available_memory_bytes(machine.root) == 32 * GIB


def test_memory_high_counts_as_a_limit(machine: Machine) -> None:
    """A group with `memory.high` is limited by it: above it the kernel throttles every
    allocation."""
    machine.v2("/")
    machine.v2_memory("", str(8 * GIB), GIB)
    machine.write("sys/fs/cgroup/memory.high", f"{4 * GIB}\n")
    found = memory_limit(machine.root)
    assert found == MemoryLimit(4 * GIB, 3 * GIB, "/sys/fs/cgroup/memory.high")


def test_a_full_group_has_no_available_memory(machine: Machine) -> None:
    machine.v2("/")
    machine.v2_memory("", str(GIB), 2 * GIB)
    assert available_memory_bytes(machine.root) == 0


def test_a_v1_controller_in_a_hybrid_hierarchy_is_found(machine: Machine) -> None:
    """A controller of version 1 works next to the unified tree: systemd's hybrid mode has an empty
    tree of version 2 in addition to those of version 1."""
    machine.v1("/")
    machine.v1_memory("", str(GIB), 0)
    path = machine.root / "proc/self/mountinfo"
    path.write_text(
        path.read_text() + "38 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    )
    own = machine.root / "proc/self/cgroup"
    own.write_text("0::/init.scope\n" + own.read_text())
    assert available_memory_bytes(machine.root) == GIB


def test_a_path_outside_the_mount_means_the_mount(machine: Machine) -> None:
    """A path outside of the mount counts as the mount: `docker exec` may show a path that leads
    above the container's own group."""
    machine.v2("/../other")
    machine.v2_memory("", str(GIB), 0)
    assert available_memory_bytes(machine.root) == GIB


@given(
    st.text(max_size=40),
    st.text(max_size=40),
    st.sampled_from(["proc/self/cgroup", "proc/self/mountinfo", "sys/fs/cgroup/memory.stat"]),
)
def test_damaged_files_cause_no_limit_and_no_error(
    tmp_path_factory: pytest.TempPathFactory, text: str, limit: str, damaged: str
) -> None:
    machine = Machine(tmp_path_factory.mktemp("root"))
    machine.v2("/")
    machine.v2_memory("", limit, 0)
    machine.write("sys/fs/cgroup/cpu.max", limit)
    machine.write(damaged, text)
    assert 0 <= available_memory_bytes(machine.root) <= 32 * GIB
    assert 1 <= available_cores(machine.root) <= len(os.sched_getaffinity(0))


PROBE = """
import torch
from swell.configs.runtime.process import available_cores
from swell.worker.memory.kv_cache import free_bytes
print(free_bytes(torch.device("cpu"), 1), available_cores())
"""


@contextlib.contextmanager
def group_of_kernel(controller: str) -> Iterator[Path]:
    folder = Path("/sys/fs/cgroup", controller, f"swell-test-{os.getpid()}")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"this account makes no cgroup {folder}: {error}")
    try:
        yield folder
    finally:
        folder.rmdir()


def run_in(group: Path) -> tuple[int, int]:
    """Returns the worker memory and cores that a new process of this group detects."""
    enter = f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
    command = [sys.executable, "-c", enter + PROBE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=True)
    memory, cores = done.stdout.split()
    return int(memory), int(cores)


def test_a_process_sees_the_memory_limit_of_its_real_cgroup() -> None:
    limit = 2 * GIB
    with group_of_kernel("memory") as group:
        if not (group / "memory.limit_in_bytes").exists():
            pytest.skip("no tree of version 1 for memory")
        (group / "memory.limit_in_bytes").write_text(str(limit))
        memory, _ = run_in(group)
    assert 0 < memory < limit, "the process itself has some"


def test_a_process_sees_the_core_limit_of_its_real_cgroup() -> None:
    with group_of_kernel("cpu") as group:
        if not (group / "cpu.cfs_quota_us").exists():
            pytest.skip("no tree of version 1 for processors")
        (group / "cpu.cfs_quota_us").write_text("100000")
        _, cores = run_in(group)
    assert cores == 1
