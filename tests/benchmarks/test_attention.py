"""Rows of the attention benchmark: what they are held against, and results that are compared."""

from __future__ import annotations

import argparse
import importlib.machinery
import sys
import types

import pytest
import torch

import _attention_layouts
import _attention_training
import attention
from _rows import environment


@pytest.mark.parametrize("pattern", _attention_layouts.PATTERNS)
def test_rows_are_held_against_the_arm_of_their_bar(pattern: str):
    case = _attention_layouts.Case(pattern=pattern, num_tokens=256, dim=16)
    rows = {row.arm: row for row in attention.layout_rows(case, 2, "cpu", environment())}
    assert tuple(rows) == case.arms
    ours = rows[attention.OURS]
    density = ours.extra["density"]
    bar = case.bar(density)
    if bar is None:
        assert ours.limit is None and density > 0.25
    else:
        assert ours.limit is not None and ours.limit_fraction is not None
        ratio = rows[bar[0]].extra["times_of_ours"]
        assert ours.limit_fraction * bar[1] == pytest.approx(ratio)


def test_flash_attention_is_an_arm_where_it_is_installed(monkeypatch):
    def flash_attn_func(q, k, v, *, causal):
        heads_first = [each.transpose(1, 2) for each in (q, k, v)]
        attend = _attention_layouts.scaled_dot_product_attention
        return attend(*heads_first, is_causal=causal).transpose(1, 2)

    package = types.ModuleType("flash_attn")
    package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    package.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    case = _attention_layouts.Case(pattern="causal", num_tokens=256, dim=16)
    rows = {row.arm for row in attention.layout_rows(case, 1, "cpu", environment())}
    assert rows == {*case.arms} and _attention_layouts.FLASH in rows


def test_random_layouts_have_their_density_and_the_diagonal():
    layout = _attention_layouts.make_layout("random 0.25", 1024)
    assert layout.density == 0.25
    assert bool(layout.block_mask()[0].diagonal().all())


def test_a_wrong_result_ends_the_measurement(monkeypatch):
    def wrong(q, k, v, layout):
        return _attention_layouts.scaled_dot_product_attention(q, k, v) * q.new_tensor(1.01)

    monkeypatch.setattr(_attention_layouts, "blocksparse", wrong)
    case = _attention_layouts.Case(pattern="documents", num_tokens=700, dim=16)
    with pytest.raises(AssertionError, match="differs from penstock"):
        list(attention.layout_rows(case, 1, "cpu", environment()))


def test_packed_training_has_the_losses_of_documents_alone():
    options = argparse.Namespace(layers=1, hidden=128, rounds=1)
    found, alone = _attention_training.measure(700, options.layers, options.hidden, 1)
    assert len(alone) == 2
    for measured in found.values():
        assert len(measured.seconds) == 1
        assert torch.allclose(measured.losses, alone, rtol=1e-5)
