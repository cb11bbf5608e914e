"""Partitions in effect: ranks over gloo train as one process does, and exchange what is planned."""

from __future__ import annotations

import functools
import signal
from pathlib import Path

import pytest
import torch

from _ranks import NUM_RANKS, needs_gloo, spawn, start

pytest.importorskip("torch.distributed.tensor", reason="this torch was built without distributed")

import _rank_cases
from penstock.compat.placements import GATHERS_STRIDED

CASES = [
    *(("mlp", "fsdp"), ("mlp", "tensor"), ("words", "auto"), ("dropout", "batch")),
    *(("cell", "auto"), ("cnn", "batch"), ("gpt2", "auto"), ("llama", "tensor")),
    *(("resnet", "auto"), ("lstm", "fsdp"), ("mixture", "auto"), ("columns", "tensor")),
]
RESUMED = [("words", "auto"), ("llama", "tensor"), ("mixture", "auto")]
"""Cases that two ranks save and four go on with."""
REPLICATED = {("cnn", "batch"), ("dropout", "batch")}
ROUNDING_BYTES = 1024  # of some dozen pieces of the smallest steps to 64 bytes each
TOLERANCE = 1e-5  # relative, of float32 sums of at most a hundred numbers in another order


@needs_gloo
@pytest.mark.skipif(not GATHERS_STRIDED, reason="this torch gathers no dimension in turns")
def test_ranks_train_as_one_process_does(tmp_path: Path):
    cases = [_rank_cases.make_case(*case, NUM_RANKS) for case in CASES]
    names = {case: str(tmp_path / "-".join(case)) for case in RESUMED}
    saved = [_rank_cases.Saved(cases[CASES.index(case)], path) for case, path in names.items()]
    work = functools.partial(_rank_cases.run_cases, cases, saved, _rank_cases.make_adam_case())
    alone = _rank_cases.train_unlike_ranks(None)
    for *results, unlike, refused in spawn(work, NUM_RANKS, tmp_path):
        assert unlike["seen"] == pytest.approx(alone["seen"], rel=TOLERANCE)
        assert "a number was 0 on rank 0 and 1 on rank 1" in unlike["refused"]
        assert "mesh" in refused
        assert str(cases[0].partition.mesh) in refused
        for case, found in zip(CASES, results, strict=True):
            losses, state = _rank_cases.train_alone(case[0])
            assert found["losses"] == pytest.approx(losses, rel=TOLERANCE), case
            for key, expected in state.items():
                given = found["state"][key]
                assert torch.allclose(given, expected, rtol=TOLERANCE, atol=TOLERANCE), (case, key)
            assert "evaluation mode" in found["changed"], case
            assert (found["splits"] > 0) is (case not in REPLICATED), case
            planned, held = found["peaks"]
            assert held == pytest.approx(planned, rel=0.03, abs=ROUNDING_BYTES), case
            if case[0] == "columns":  # no sum of a gradient is split
                assert all(torch.equal(state[key], found["state"][key]) for key in state)
            if case[0] != "cnn":  # its statistics are exchanged otherwise
                planned, counted = found["collectives"]
                assert planned == counted, case
                assert len(set(found["bytes"])) == 1, case
    _resume_on_more_ranks(names, tmp_path)


def _resume_on_more_ranks(names: dict[tuple[str, str], str], folder: Path) -> None:
    """What two ranks have saved, four go on with."""
    saved = [
        _rank_cases.Saved(_rank_cases.make_case(name, "tensor", 2 * NUM_RANKS), path)
        for (name, _), path in names.items()
    ]
    work = functools.partial(_rank_cases.resume_cases, saved)
    for results in spawn(work, 2 * NUM_RANKS, folder):
        for case, found in zip(names, results, strict=True):
            losses, state = _rank_cases.train_alone(case[0])
            assert found["losses"] == pytest.approx(losses[_rank_cases.NUM_SAVED :], rel=TOLERANCE)
            for key, expected in state.items():
                given = found["state"][key]
                assert torch.allclose(given, expected, rtol=TOLERANCE, atol=TOLERANCE), (case, key)
            planned, held = found["peaks"]
            assert held == pytest.approx(planned, rel=0.03, abs=ROUNDING_BYTES), case


@needs_gloo
@pytest.mark.parametrize("planned", [False, True], ids=["applied", "planned"])
def test_a_rank_that_is_killed_is_an_error_of_the_others(tmp_path: Path, planned: bool):
    case = _rank_cases.make_case("mlp", "tensor", NUM_RANKS)
    ranks = start(functools.partial(_rank_cases.survive, case, planned), NUM_RANKS, tmp_path)
    for each in ranks:
        each.join(60)
    assert [each.exitcode for each in ranks] == [0, -signal.SIGKILL]
    error = torch.load(tmp_path / "0.pt")
    assert "collective" in error
    assert "rank 0" in error
    assert "another rank may have ended" in error
