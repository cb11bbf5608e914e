"""Rows of the attention kernel of a KV cache on a device, here the CPU; and what needs one."""

from __future__ import annotations

import sys

import pytest
import torch

import _kv_cache
import _kv_device
import kv
from _rows import environment

CASE = _kv_device.DeviceCase(shape="1B", num_keys=2048, least_bytes=9 << 20)


def test_rows_name_bytes_and_the_rate_that_they_are_held_against():
    rows = {row.arm: row for row in _kv_device.device_rows([CASE], "cpu", environment())}
    assert tuple(rows) == _kv_device.ARMS
    layer_bytes = 2 * 8 * 2048 * 64 * 2
    assert CASE.num_layers == 3 and CASE.layer_bytes == layer_bytes
    assert rows[_kv_device.RESIDENT].moved_bytes == {"device": layer_bytes}
    assert rows[_kv_device.DIRECT].moved_bytes == {"host->device": layer_bytes}
    assert rows[_kv_device.SELECTED].moved_bytes == {"host->device": layer_bytes // 16}
    for row in rows.values():
        rate = sum(row.moved_bytes.values()) / row.median_seconds
        assert row.limit is not None and row.limit_fraction is not None
        assert row.limit_fraction * row.limit.value == pytest.approx(rate)


def test_a_wrong_result_ends_the_measurement(monkeypatch):
    layers_of = _kv_device.DeviceLayers.addresses

    def swapped(self, records, layer):
        return layers_of(self, records, layer).flip(1)  # the heads of other queries

    monkeypatch.setattr(_kv_device.DeviceLayers, "addresses", swapped)
    with pytest.raises(AssertionError, match="penstock, on the GPU"):
        _kv_device.measure(CASE, torch.device("cpu"))


def test_what_is_measured_on_a_gpu(monkeypatch, capsys):
    for part, num_rows in (("kernel", 2 * 3 * 5), ("decode", 2 * 3 * 8 * 2)):
        monkeypatch.setattr(sys, "argv", ["kv.py", "--device", "cuda", "--dry-run", "--part", part])
        kv.main()
        assert len(capsys.readouterr().out.splitlines()) == num_rows


def test_rows_of_caches_name_bytes_read(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    shape = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    monkeypatch.setitem(_kv_cache.SHAPES, "tiny", shape)
    for name, number in (
        ("CHUNK", 512),
        ("STEPS", 2),
        ("LINK_BYTES", 1 << 20),
        ("STAGING_BYTES", 1 << 20),
    ):
        monkeypatch.setattr(_kv_cache, name, number)
    case = _kv_cache.CacheCase(shape="tiny", context=16384, num_layers=1)
    assert case.cache_bytes == 4 << 20
    arms = [each for each in _kv_cache.ARMS if each.stock != _kv_cache.OFFLOADED]  # of a GPU
    found = _kv_cache.cache_rows([case], arms, "cpu", str(tmp_path), environment())
    rows = {(row.arm, row.extra["part"]): row for row in found}
    assert len(rows) == 2 * len(arms)
    decode = {arm: row for (arm, part), row in rows.items() if part == "decode"}
    assert not decode["DynamicCache"].moved_bytes
    quarter = decode["penstock, all, 1/4 resident, host below"]
    selected = decode["penstock, nosa, 1/4 resident, host below"]
    assert 0.4 * case.cache_bytes < quarter.moved_bytes["host->device"] < case.cache_bytes
    assert selected.moved_bytes.get("host->device", 0) < quarter.moved_bytes["host->device"] / 4
    assert quarter.limit is not None and quarter.extra["speed_to_stock"] > 0
