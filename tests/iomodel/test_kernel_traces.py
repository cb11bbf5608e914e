"""Traces of CPU kernels: within 5 % of their model, and of the kernels' own constants."""

from __future__ import annotations

import pytest

import _iomodel_models
from _attention_layouts import make_layout
from penstock.iomodel import simulate_caches


@pytest.mark.parametrize("pattern", ["random 0.25", "documents", "causal"])
def test_attention_reads_the_listed_blocks(pattern):
    layout = make_layout(pattern, 4096 if pattern == "random 0.25" else 1024)
    trace, models = _iomodel_models.block_attention_trace(layout, 64, 1, 2**18)
    (moved,) = simulate_caches(trace, [2**18])
    if pattern == "random 0.25":
        assert moved.moved_bytes == pytest.approx(models[2**18], rel=0.05)
    else:  # neighbouring rows list the same blocks, some of which are still at hand
        assert moved.moved_bytes <= 1.05 * models[2**18]


def test_the_trace_follows_the_kernel(monkeypatch, tmp_path):
    layout = make_layout("random 0.25", 512)
    before = _iomodel_models.block_attention_trace(layout, 64, 1, 2**18)[0].read_bytes
    source = (_iomodel_models._ATTENTION / "tiles.cpp").read_text()
    (tmp_path / "tiles.cpp").write_text(source.replace("int kVecs = 2;", "int kVecs = 4;"))
    monkeypatch.setattr(_iomodel_models, "_ATTENTION", tmp_path)
    assert _iomodel_models.block_attention_trace(layout, 64, 1, 2**18)[0].read_bytes < before
    (tmp_path / "tiles.cpp").write_text("")
    with pytest.raises(ValueError, match="no constant kVecs"):
        _iomodel_models.block_attention_trace(layout, 64, 1, 2**18)
