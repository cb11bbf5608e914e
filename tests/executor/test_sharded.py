"""FSDP2 over gloo, two processes: planned steps of sharded models train as FSDP2 itself does."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from _ranks import NUM_RANKS, needs_gloo, spawn

pytest.importorskip("torch.distributed.fsdp", reason="this torch was built without distributed")

import _sharded_cases

TRAINED = {
    # Ranks capture and plan a model once for all cases of their group.
    "adamw, evaluations, ways to give up, kinds of parameters": [
        *("adamw", "operator by operator", "evaluated", "saved", "eager steps"),
        *("kept whole", "root given up", "several modules in one", "checkpoints"),
        *("tied", "frozen", "bfloat16", "bfloat16, no reduce_dtype"),
    ],
    "other optimizers, clipping, accumulation, changes between steps": [
        *("two shapes", "captured when bound", "fitted"),
        *("momentum", "clipped", "clipped to the largest", "accumulated"),
        *("changed in place", "loaded", "eager fused steps", "assigned"),
    ],
}
MESSAGES = {
    "refused: HSDP": ("'words.weight'", "Replicate(), Shard(dim=0)", "mesh of one dimension"),
    "refused: columns": ("'words.weight'", "Shard(dim=1)", "by rows"),
    "refused: offloaded": ("'words.weight'", "CPUOffloadPolicy", "host_memory= or store="),
    "refused: float16": ("'words.weight'", "float16", "torch.bfloat16"),
    "refused: grad_dtype": ("'head.weight'", "torch.float64", "reduce_dtype="),
    "refused: tensor parallel": ("'head.weight'", "(Replicate(),)", "use fully_shard"),
    "refused: meta": ("'words.weight'", "meta device", "to_empty"),
    "refused: unsynchronised": ("'words.weight'", "set_requires_gradient_sync", "accumulate="),
    "refused: outside": ("'blocks.0.up.weight'", "outside of the forward pass"),
    "refused: own norm": ("'scale.grad'", "linalg_vector_norm", "clip_grad_norm_"),
    "refused: averaged": ("'scale.grad'", "average_over_ranks_", "averaged the gradients already"),
    "refused: optimizer": ("'scale.grad'", "linalg_vector_norm", "element by element"),
}


def found_by_ranks(names: list[str], output: Path, store: Path) -> list[dict[str, Any]]:
    """Results of each rank, by case."""
    found = spawn(functools.partial(_sharded_cases.run_cases, names, store), NUM_RANKS, output)
    errors = [case["error"] for each in found for case in each.values() if "error" in case]
    assert not errors, errors[0]
    return found


@needs_gloo
@pytest.mark.parametrize("names", TRAINED.values(), ids=TRAINED.keys())
def test_ranks_train_as_fsdp_does(names, tmp_path, store):
    assert found_by_ranks(names, tmp_path, store) == [{name: [] for name in names}] * NUM_RANKS


@pytest.fixture(scope="module")
def found_without_training(tmp_path_factory) -> list[dict[str, Any]]:
    """Results of each rank that captures models, and trains none of them as planned."""
    folder = tmp_path_factory.mktemp("ranks")
    return found_by_ranks([*MESSAGES, "after a refusal", "gathered bytes"], folder, folder)


@needs_gloo
def test_what_a_graph_does_not_hold_is_refused_by_name(found_without_training):
    for found in found_without_training:
        assert found["after a refusal"] == []
        for name, parts in MESSAGES.items():
            assert all(part in found[name] for part in parts), found[name]


@needs_gloo
def test_whole_parameters_are_freed_after_their_last_use(found_without_training):
    """A block more needs its shards, their momentum and gradients, and no whole parameters."""
    for found in found_without_training:
        num_bytes = found["gathered bytes"]
        freed, kept = (
            (num_bytes[f"{name} 2"] - num_bytes[f"{name} 1"]) / num_bytes["block"]
            for name in ("freed", "kept")
        )
        assert freed < 1.75  # three halves, padding, and the activations that backward needs
        assert kept > freed + 0.75
