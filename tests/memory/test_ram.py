"""RAM is what the machine has, or what the control groups of the process allow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.memory import _ram, available_ram, installed_ram

GIB = 2**30


@pytest.fixture
def groups(tmp_path, monkeypatch) -> Path:
    """A tree of control groups in which this process is in /service/job."""
    monkeypatch.setattr(_ram, "_GROUPS", tmp_path)
    monkeypatch.setattr(_ram, "_PROCESS", tmp_path / "process")
    (tmp_path / "process").write_text("12:cpu:/elsewhere\n0::/service/job\n")
    (tmp_path / "service" / "job").mkdir(parents=True)
    return tmp_path


def limit(group: Path, maximum: str, current: int = 0, inactive: int = 0) -> None:
    (group / "memory.max").write_text(f"{maximum}\n")
    (group / "memory.current").write_text(f"{current}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")


def test_without_limits_it_is_the_machine(groups):
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit(groups / "service" / "job", "max")
    assert installed_ram() == installed
    assert 0 < available_ram() <= installed


def test_the_lowest_limit_on_the_way_up_counts(groups):
    job, service = groups / "service" / "job", groups / "service"
    limit(job, str(GIB), current=GIB // 4)
    assert installed_ram() == GIB
    assert available_ram() == GIB - GIB // 4
    limit(service, str(GIB // 2), current=GIB // 2, inactive=GIB // 8)
    assert installed_ram() == GIB // 2
    assert available_ram() == GIB // 8


def test_more_than_allowed_is_in_use(groups):
    limit(groups / "service", str(GIB), current=2 * GIB)
    assert available_ram() == 0


def test_a_container_that_sees_its_group_as_the_root(groups):
    (groups / "process").write_text("0::/docker/of/the/host\n")
    limit(groups, str(GIB), current=10)
    assert (installed_ram(), available_ram()) == (GIB, GIB - 10)


def test_nothing_to_read(groups, tmp_path, monkeypatch):
    monkeypatch.setattr(_ram, "_PROCESS", tmp_path / "missing")
    monkeypatch.setattr(_ram, "_MEMINFO", tmp_path / "missing")
    assert 0 < available_ram() <= installed_ram()
