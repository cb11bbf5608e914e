"""Partitions in effect: ranks over gloo train as one process does, and exchange what is planned."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from _ranks import NUM_RANKS, needs_gloo, spawn

pytest.importorskip("torch.distributed.tensor", reason="this torch was built without distributed")

import _rank_cases

CASES = [
    *(("mlp", "fsdp"), ("mlp", "tensor"), ("words", "auto"), ("dropout", "batch")),
    *(("cell", "auto"), ("cnn", "batch")),
]
TOLERANCE = 1e-5  # relative, of float32 sums of at most a hundred numbers in another order


@needs_gloo
def test_ranks_train_as_one_process_does(tmp_path: Path):
    cases = [_rank_cases.make_case(*case, NUM_RANKS) for case in CASES]
    work = functools.partial(_rank_cases.run_cases, cases)
    for *results, refused in spawn(work, NUM_RANKS, tmp_path):
        assert "mesh" in refused
        assert str(cases[0].partition.mesh) in refused
        for case, found in zip(CASES, results, strict=True):
            losses, state = _rank_cases.train_alone(case[0])
            assert found["losses"] == pytest.approx(losses, rel=TOLERANCE), case
            for key, expected in state.items():
                given = found["state"][key]
                assert torch.allclose(given, expected, rtol=TOLERANCE, atol=TOLERANCE), (case, key)
            assert "evaluation mode" in found["changed"], case
            assert (found["splits"] > 0) is (case[1] != "batch"), case
            if case[0] != "cnn":  # its statistics are exchanged otherwise
                planned, counted = found["collectives"]
                assert planned == counted, case
                assert len(set(found["bytes"])) == 1, case
