"""`probe` measures what is there, keeps it, and works where it cannot keep it."""

import dataclasses
import json
import logging
import os
import stat
import time
from pathlib import Path

import pytest

import penstock
from penstock.errors import StoreUnavailableError
from penstock.memory import (
    ComputeProfile,
    FileStore,
    LinkProfile,
    MachineProfile,
    Tier,
    TierProfile,
    _probe,
)
from penstock.memory import Link as L

pytestmark = pytest.mark.usefixtures("quick_probe")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory of the profiles during a test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PENSTOCK_CACHE_DIR", raising=False)
    return tmp_path / "penstock" / "profiles"


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        _probe, "_device", lambda: _probe._ProbedDevice("cpu", "a processor", 2**30)
    )


def count_measurements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    original = _probe._measure

    def measure(*args):
        calls.append("measured")
        return original(*args)

    monkeypatch.setattr(_probe, "_measure", measure)
    return calls


@pytest.mark.usefixtures("on_cpu")
def test_a_machine_without_a_gpu(store: Path):
    profile = penstock.probe(store)
    assert (profile.device, profile.device_name) == ("cpu", "a processor")
    assert profile.num_cores == len(os.sched_getaffinity(0))
    assert set(profile.compute.flops_per_second) == {"float32", "bfloat16"}
    assert min(profile.compute.flops_per_second.values()) > 0
    assert profile.compute.memory_bytes_per_second > 0
    assert 0 < profile.compute.launch_seconds < 1
    assert profile.store == str(store)
    assert profile.direct_io is True
    assert set(profile.tiers) == {Tier.DEVICE, Tier.FILE}
    assert profile.tiers[Tier.DEVICE].capacity_bytes == 2**30
    assert profile.tiers[Tier.FILE].capacity_bytes > 0
    assert set(profile.links) == {L.DEVICE_TO_FILE, L.FILE_TO_DEVICE}
    assert set(profile.both_ways) == set(profile.links)
    for link in [*profile.links.values(), *profile.both_ways.values(), profile.memcpy]:
        first, third = link.quartiles
        assert 0 < first <= link.bytes_per_second <= third
        assert link.num_runs >= 3


@pytest.mark.gpu
def test_a_machine_with_a_gpu(store: Path):
    profile = penstock.probe(store)
    assert profile.device == "cuda"
    assert set(profile.tiers) == set(Tier)
    assert set(profile.links) == {
        L.DEVICE_TO_HOST,
        L.HOST_TO_DEVICE,
        L.HOST_TO_FILE,
        L.FILE_TO_HOST,
    }
    assert profile.links[L.DEVICE_TO_HOST].bytes_per_second > 1e9


def test_with_a_gpu_all_links_meet_in_the_host(store: Path, monkeypatch: pytest.MonkeyPatch):
    pcie = LinkProfile(5e10, (5e10, 5e10), 9)
    monkeypatch.setattr(_probe, "_device", lambda: _probe._ProbedDevice("cuda", "a GPU", 2**37))
    monkeypatch.setattr(
        _probe, "_measure_pcie", lambda: {L.DEVICE_TO_HOST: pcie, L.HOST_TO_DEVICE: pcie}
    )
    monkeypatch.setattr(_probe, "_measure_compute", lambda device: None)
    monkeypatch.setattr(_probe, "_measure_caches", lambda device: ((), ()))
    monkeypatch.setattr(_probe, "measure_pages", dict)
    profile = penstock.probe(store)
    assert set(profile.tiers) == set(Tier)
    assert profile.tiers[Tier.DEVICE].capacity_bytes == 2**37
    assert profile.links[L.DEVICE_TO_HOST] == pcie
    assert set(profile.links) == set(L) - {L.DEVICE_TO_FILE, L.FILE_TO_DEVICE}
    assert set(profile.both_ways) == {L.HOST_TO_FILE, L.FILE_TO_HOST}


def test_the_real_device_has_a_name_and_memory():
    device = _probe._device()
    assert device.name
    assert device.capacity_bytes > 2**28


@pytest.mark.usefixtures("on_cpu")
def test_without_a_store_there_is_no_file_tier():
    profile = penstock.probe()
    assert set(profile.tiers) == {Tier.DEVICE}
    assert profile.links == {}
    assert (profile.store, profile.direct_io) == (None, None)


@pytest.mark.usefixtures("on_cpu")
def test_the_profile_is_kept_and_measured_again_when_asked(
    store: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    calls = count_measurements(monkeypatch)
    first = penstock.probe(store)
    assert penstock.probe(str(store)).links == first.links
    assert len(calls) == 1
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    penstock.probe(store, refresh=True)
    assert len(calls) == 2
    penstock.probe(FileStore(store, "100MiB"))  # another limit, another profile
    penstock.probe()
    assert len(calls) == 4
    assert all(path.suffix == ".lock" or len(path.name) == 32 for path in cache.iterdir())


@pytest.mark.usefixtures("on_cpu")
def test_capacities_are_those_of_now(store: Path, monkeypatch: pytest.MonkeyPatch):
    penstock.probe(store)
    calls = count_measurements(monkeypatch)
    monkeypatch.setattr(_probe, "_tiers", lambda *_: {Tier.FILE: TierProfile(77)})
    assert penstock.probe(store).tiers == {Tier.FILE: TierProfile(77)}
    assert calls == []


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": "x"}'])
def test_a_broken_cache_is_measured_again(
    store: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, text: str
):
    penstock.probe(store)
    (kept,) = cache.glob("*/profile.json")
    kept.write_text(text)
    calls = count_measurements(monkeypatch)
    assert penstock.probe(store).links
    assert len(calls) == 1
    assert MachineProfile.from_dict(json.loads(kept.read_text())).links


@pytest.mark.usefixtures("on_cpu")
def test_a_cache_that_others_may_write_is_not_used(cache: Path, caplog: pytest.LogCaptureFixture):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with caplog.at_level(logging.WARNING, logger="penstock"):
        assert penstock.probe().memcpy.num_runs >= 3
    assert "profiles are not cached" in caplog.text
    assert "others can write to it" in caplog.text
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("on_cpu")
def test_the_cache_directory_can_be_named(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "own"))
    calls = count_measurements(monkeypatch)
    penstock.probe()
    penstock.probe()
    assert len(calls) == 1
    assert list((tmp_path / "own" / "profiles").glob("*/profile.json"))
    assert not cache.exists()


@pytest.mark.usefixtures("on_cpu")
def test_without_a_cache_directory_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, logger="penstock"):
        assert penstock.probe().memcpy.num_runs >= 3
    assert "profiles are not cached" in caplog.text


@pytest.mark.usefixtures("on_cpu")
def test_a_throttled_store_is_measured_as_slow_as_it_is(
    store: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_probe, "_RUN_SECONDS", 1000.0)  # as many requests as there is room for
    limits = FileStore(store, "8MiB", "50MB/s", "40MB/s")
    for _ in range(20):
        links = penstock.probe(limits, refresh=True).links
        out = links[L.DEVICE_TO_FILE].bytes_per_second / 50e6
        back = links[L.FILE_TO_DEVICE].bytes_per_second / 40e6
        assert max(out, back) < 1.2  # a run of 0.17 s may use the credit of 10 ms of idle time
        if min(out, back) > 0.5:  # a busy machine can only make it slower
            return
    pytest.fail("it was measured as slower than it is")


@pytest.mark.usefixtures("on_cpu")
def test_a_store_smaller_than_a_request_is_measured(store: Path):
    profile = penstock.probe(FileStore(store, max_bytes="20KB"))
    assert profile.both_ways == {}  # one request is all that fits
    assert profile.tiers[Tier.FILE].capacity_bytes == 20_000
    assert set(profile.links) == {L.DEVICE_TO_FILE, L.FILE_TO_DEVICE}


@pytest.mark.usefixtures("on_cpu")
def test_a_missing_store_is_refused_and_not_kept(store: Path, cache: Path):
    for path in (store / "missing", Path(__file__)):
        with pytest.raises(StoreUnavailableError):
            penstock.probe(path)
    assert list(cache.glob("*.json")) == [] if cache.exists() else True


def example() -> MachineProfile:
    link, slower = LinkProfile(1.5e9, (1.25e9, 1.75e9), 7), LinkProfile(1e9, (9e8, 2e9), 3)
    return MachineProfile(
        name="here",
        device="cuda",
        device_name="a GPU",
        num_cores=16,
        tiers={Tier.DEVICE: TierProfile(2**37), Tier.HOST: TierProfile(2**36)},
        links={L.DEVICE_TO_HOST: link, L.HOST_TO_FILE: link},
        memcpy=link,
        store="/mnt/nvme",
        direct_io=False,
        compute=ComputeProfile(
            flops_per_second={"float32": 2e12},
            memory_bytes_per_second=1e11,
            launch_seconds=5e-6,
        ),
        both_ways={L.HOST_TO_FILE: slower},
    )


def test_a_profile_survives_json():
    profile = example()
    assert MachineProfile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile


def test_a_profile_of_an_older_version_knows_less():
    data = example().to_dict()
    del data["compute"], data["both_ways"]
    expected = dataclasses.replace(example(), compute=None, both_ways={})
    assert MachineProfile.from_dict(data) == expected


def test_plans_are_made_with_links_that_are_busy_both_ways():
    links = example().while_both_are_busy().links
    assert links[L.HOST_TO_FILE].bytes_per_second == 1e9
    assert links[L.DEVICE_TO_HOST].bytes_per_second == 1.5e9


@pytest.mark.parametrize("change", [{"tiers": {"moon": {}}}, {"links": 5}, {"memcpy": {}}])
def test_what_is_no_profile_is_refused(change: dict[str, object]):
    with pytest.raises(ValueError, match="data is not a machine profile"):
        MachineProfile.from_dict({**example().to_dict(), **change})


def test_a_profile_prints_as_a_table():
    text = str(example())
    for part in (
        "a GPU (cuda)",
        "128.00 GiB",
        "device->host",
        "1.40 GiB/s",
        "host->file, both ways",
        "7 runs",
        "/mnt/nvme",
        "2 TFLOP/s",
    ):
        assert part in text


def test_median_and_quartiles():
    assert LinkProfile.of([4.0, 1.0, 3.0, 2.0, 5.0]) == LinkProfile(3.0, (2.0, 4.0), 5)


@pytest.mark.usefixtures("on_cpu")
def test_what_a_busy_minute_measured_is_measured_again_once_it_is_quieter(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    load = [4.0]
    monkeypatch.setattr(_probe, "_load", lambda: load[0])
    calls = count_measurements(monkeypatch)
    busy = penstock.probe()
    assert busy.was_busy and busy.load == 4.0
    assert "busy" in caplog.text and "busy when measured" in str(busy)
    load[0] = 3.0  # not much quieter
    assert penstock.probe().load == 4.0
    assert len(calls) == 1
    load[0] = 0.1
    quiet = penstock.probe()
    assert quiet.load == 0.1 and len(calls) == 2
    load[0] = 0.01  # a quiet one is kept
    assert penstock.probe().load == 0.1 or quiet.was_busy
    assert MachineProfile.from_dict(quiet.to_dict()) == quiet


@pytest.mark.usefixtures("on_cpu")
def test_rates_that_varied_are_measured_again_after_a_while(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_probe, "_load", lambda: 0.0)
    varied = LinkProfile(1e9, (5e8, 2e9), 9)
    assert varied.spread == pytest.approx(1.5)
    monkeypatch.setattr(_probe, "_measure_memcpy", lambda: varied)
    calls = count_measurements(monkeypatch)
    assert penstock.probe().was_busy
    penstock.probe()
    assert len(calls) == 1  # not at every call: some disks always vary
    now = time.time()
    monkeypatch.setattr(_probe.time, "time", lambda: now + 601.0)
    penstock.probe()
    assert len(calls) == 2


@pytest.mark.usefixtures("on_cpu")
def test_a_profile_names_the_store_as_the_caller_did(store, monkeypatch: pytest.MonkeyPatch):
    """It is kept by the real path, which another call may have written in another way."""
    calls = count_measurements(monkeypatch)
    monkeypatch.chdir(store.parent)
    first, again = penstock.probe(store.name), penstock.probe(store)
    assert (first.store, again.store) == (store.name, str(store))
    assert len(calls) == 1
