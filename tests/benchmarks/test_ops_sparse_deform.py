"""Arms of sparse products and deformable convolutions compute the same; rows say the bars."""

from __future__ import annotations

import argparse

import torch

import _ops_deform
import _ops_spgemm
from _rows import Environment

WHERE = Environment(device_name="cpu", versions={}, commit="0", command="x")
OPTIONS = argparse.Namespace(device="cpu", rounds=1, match="")


def test_products_are_held_against_torch():
    a = _ops_spgemm.draw(40, 3)
    head = _ops_spgemm.head(a, 7)
    assert torch.equal(head.to_dense(), a.to_dense()[:7])
    rows = {row.arm: row for row in _ops_spgemm.forward_rows("forward: x", head, a, OPTIONS, WHERE)}
    assert {_ops_spgemm.OURS, _ops_spgemm.AGAIN, _ops_spgemm.TORCH} <= set(rows)
    ours = rows[_ops_spgemm.OURS]
    assert ours.limit is not None and ours.limit.value == 0.6
    assert ours.extra["num_products"] >= ours.extra["num_entries"] > 0
    assert ours.extra["largest_error"] < 1e-6
    steps = list(_ops_spgemm.step_rows(40, 3, OPTIONS, WHERE))
    assert steps[0].extra["num_gradient_entries"] == steps[0].extra["num_entries"]
    assert steps[1].extra["num_gradient_entries"] > steps[1].extra["num_entries"]


def test_steps_of_convolutions_are_rows():
    case = _ops_deform.Case(1, 4, 6, has_mask=True)
    rows = list(_ops_deform.step_rows(case, OPTIONS, WHERE))
    assert rows[0].arm == _ops_deform.OURS
    assert str(case) == "1 x 4 x 6 x 6, mask, float32" and str(case) in rows[0].case


def test_cases_are_announced():
    everything = _ops_spgemm.announce_rows(OPTIONS) + _ops_deform.announce_rows(OPTIONS)
    assert len(set(everything)) == len(everything)
    few = argparse.Namespace(device="cuda", rounds=1, match="peak")
    assert not _ops_spgemm.announce_rows(few) and not _ops_deform.announce_rows(few)
