"""Rows of the attention kernel of a KV cache on a device, here the CPU; and what needs one."""

from __future__ import annotations

import sys

import pytest
import torch

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


def test_on_a_gpu_only_the_kernel_is_measured_so_far(monkeypatch, capsys):
    for flags, said in ((["--part", "kernel"], "256"), ([], "")):
        monkeypatch.setattr(sys, "argv", ["kv.py", "--device", "cuda", "--dry-run", *flags])
        if said:
            kv.main()
            assert len(capsys.readouterr().out.splitlines()) == 2 * 3 * 5
        else:
            with pytest.raises(SystemExit, match="add --part kernel"):
                kv.main()
