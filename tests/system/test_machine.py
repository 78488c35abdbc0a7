"""Memory within the limits of containers, faked by files, and the processor's name."""

import os
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from motet.system.machine import MachineMemory, cores, described_end, process_memory, processor, read_memory

GIB = 2**30
HOST = MachineMemory(64 * GIB, 48 * GIB)


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder of the control groups on a host with 64 GiB, 48 of them available."""
    memory = psutil.virtual_memory()._replace(total=HOST.total_bytes, available=HOST.available_bytes)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    return tmp_path / "cgroup"


def in_group(own: str, cgroups: Path) -> MachineMemory:
    file = cgroups.parent / "own"
    file.write_text(own)
    return read_memory(cgroups, file)


def add_group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / f"memory.{name}").write_text(f"{content}\n")


def test_without_groups_the_memory_is_the_hosts(cgroups: Path) -> None:
    assert read_memory(cgroups, cgroups / "nowhere") == HOST
    assert in_group("0::/\n", cgroups) == HOST


def test_a_limit_counts_and_files_that_can_be_dropped_are_available(cgroups: Path) -> None:
    add_group(cgroups, max=4 * GIB, current=3 * GIB, stat=f"anon 5\ninactive_file {GIB}\nactive_file 7")
    assert in_group("0::/system.slice/of-the-host\n", cgroups) == MachineMemory(4 * GIB, 2 * GIB)


def test_the_smallest_limit_of_a_group_and_its_parents_counts(cgroups: Path) -> None:
    add_group(cgroups / "a", max=8 * GIB, current=7 * GIB, stat="inactive_file 0")
    add_group(cgroups / "a" / "b", max=6 * GIB, current=2 * GIB, stat="inactive_file 0")
    add_group(cgroups / "a" / "b" / "c", max="max", current=GIB, stat="inactive_file 0")
    assert in_group("0::/a/b/c\n", cgroups) == MachineMemory(6 * GIB, GIB)


def test_version_1_has_other_names_and_its_largest_number_is_no_limit(cgroups: Path) -> None:
    folder = cgroups / "memory" / "docker" / "1"
    add_group(folder, limit_in_bytes=2 * GIB, usage_in_bytes=GIB, stat=f"inactive_file 1\ntotal_inactive_file {GIB}")
    add_group(cgroups / "memory" / "free", limit_in_bytes=2**63 - 4096, usage_in_bytes=GIB, stat="")
    assert in_group("5:cpu:/x\n4:memory:/docker/1\n0::/\n", cgroups) == MachineMemory(2 * GIB, 2 * GIB)
    assert in_group("4:memory:/free\n", cgroups) == HOST


def test_a_group_that_exceeds_its_limit_has_no_memory_available(cgroups: Path) -> None:
    add_group(cgroups, max=GIB, current=2 * GIB, stat="")
    assert in_group("0::/\n", cgroups) == MachineMemory(GIB, 0)


def test_the_processor_has_a_name_everywhere_and_instruction_sets_on_linux(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Example 9000\nflags\t\t: fpu avx2\n\nmodel name\t: Second\n")
    assert processor(cpuinfo).name == "Example 9000"
    assert processor(cpuinfo).instruction_sets == {"fpu", "avx2"}
    assert processor(tmp_path / "none").name
    assert not processor(tmp_path / "none").instruction_sets


def hidden(*_: object) -> NoReturn:
    raise FileNotFoundError("/proc")


def test_memory_is_counted_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = tmp_path / "nowhere"
    counted, own = read_memory(nowhere, nowhere), process_memory()
    monkeypatch.setattr(psutil, "virtual_memory", hidden)
    monkeypatch.setattr(psutil, "Process", hidden)
    assert read_memory(nowhere, nowhere).total_bytes == counted.total_bytes
    assert 0 < read_memory(nowhere, nowhere).available_bytes < counted.total_bytes
    assert process_memory().address_bytes == 0 and process_memory().resident_bytes >= own.resident_bytes - GIB // 100


def test_cores_are_counted_without_an_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    permitted = cores()
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores() >= permitted


def test_the_end_of_a_process_by_a_signal_has_the_name_of_the_signal() -> None:
    """The bug: an engine that ran out of memory "ended with exit code -9", which does not say why."""
    assert described_end(-9) == "was ended by SIGKILL (the system does this if memory runs out)"
    assert described_end(-15) == "was ended by SIGTERM"
    assert described_end(-40) == "was ended by signal 40", "most real-time signals have no name"
    assert described_end(3) == "ended with exit code 3"
