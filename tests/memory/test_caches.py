"""Caches: sizes as Linux writes them, rates of this machine, and profiles that keep both."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from penstock.memory import CacheProfile, LinkProfile, MachineProfile, machine
from penstock.memory import _caches as caches_module
from penstock.memory._caches import find_caches, measure_caches, measure_pages
from penstock.memory.pages import HUGE_PAGE_BYTES, PAGE_BYTES


def write_cache(directory: Path, level: int, kind: str, size: str) -> None:
    directory.mkdir()
    fields = {"level": level, "type": kind, "size": size, "coherency_line_size": 64}
    for name, value in fields.items():
        (directory / name).write_text(f"{value}\n")


def test_data_caches_are_found_near_to_far(tmp_path):
    write_cache(tmp_path / "index0", 3, "Unified", "32M")
    write_cache(tmp_path / "index1", 1, "Instruction", "64K")
    write_cache(tmp_path / "index2", 1, "Data", "48K")
    (tmp_path / "index3").mkdir()  # hidden by a hypervisor
    found = find_caches(tmp_path)
    assert [(each.name, each.capacity_bytes) for each in found] == [
        ("L1", 48 * 2**10),
        ("L3", 32 * 2**20),
    ]
    assert find_caches(tmp_path / "missing") == ()


def test_rates_are_measured_and_kept():
    caches = (
        CacheProfile(name="L1", capacity_bytes=32 * 2**10, line_bytes=64),
        CacheProfile(name="L2", capacity_bytes=2**20, line_bytes=64),
    )
    measured, memory_rates = measure_caches(caches, 2, num_runs=2, run_bytes=2**20)
    assert len(memory_rates) == 2 and all(each.bytes_per_second > 0 for each in memory_rates)
    assert all(each.rate is not None and each.rate.num_runs == 2 for each in measured)
    profile = dataclasses.replace(machine("h200"), caches=measured, memory_rates=memory_rates)
    assert MachineProfile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile
    assert "L2 cache, " in str(profile)


def test_without_a_compiler_sizes_remain(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(caches_module, "load_optional_library", lambda *_, **__: None)
    caches = (CacheProfile(name="L1", capacity_bytes=2**15, line_bytes=64),)
    assert measure_caches(caches, 1) == (caches, ())
    assert measure_pages() == {}


def test_random_rows_are_measured_in_small_and_huge_pages():
    rates = measure_pages(num_runs=2, num_bytes=2**22)
    assert list(rates) == [PAGE_BYTES, HUGE_PAGE_BYTES]
    assert all(each.bytes_per_second > 0 and each.num_runs == 2 for each in rates.values())
    profile = dataclasses.replace(machine("h200"), page_rates=rates)
    assert MachineProfile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile
    assert "random rows, pages of 2.00 MiB" in str(profile)


def test_profiles_of_older_versions_have_no_caches():
    data = machine("h200").to_dict()
    del data["caches"], data["memory_rates"]
    assert MachineProfile.from_dict(data).caches == ()


def test_the_last_cache_has_the_bytes_that_are_read_fast():
    class Reader:
        num_bytes = 2**30

        def measure(self, num_bytes):
            rate = 30e9 if num_bytes <= 2**25 else 10e9
            return LinkProfile(rate, (rate, rate), 1)

    rate = LinkProfile(30e9, (30e9, 30e9), 1)
    before = CacheProfile(name="L2", capacity_bytes=2**20, line_bytes=64, rate=rate)
    last = CacheProfile(name="L3", capacity_bytes=2**29, line_bytes=64, rate=rate)
    slow = LinkProfile(10e9, (10e9, 10e9), 1)
    assert caches_module._find_share(Reader(), last, before, slow).capacity_bytes == 2**25
    whole = dataclasses.replace(last, capacity_bytes=2**24)
    assert caches_module._find_share(Reader(), whole, before, slow).capacity_bytes == 2**24
