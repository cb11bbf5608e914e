"""Partitions of a transformer block over 256 ranks: what is chosen where memory is in plenty or
short, and where there is no batch to split.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import penstock
from penstock.graph import StepGraph
from penstock.memory import machine
from penstock.partitioner import Partition, check, partition

NUM_RANKS = 256
MACHINE = dataclasses.replace(machine("h100-80gb"), devices_per_node=NUM_RANKS)
WEIGHTS = ("self_attn.out_proj", "linear1", "linear2")
"""Products with a gradient of their input; that of the first one is not asked for."""

pytestmark = pytest.mark.slow


def capture_block(num_samples: int, length: int) -> StepGraph:
    with torch.device("meta"):
        model = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, dropout=0.0)
        batch = torch.empty(num_samples, length, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return penstock.capture(model, optimizer, batch, loss=lambda out, _: out.square().mean())


def split_over(graph: StepGraph, budget: int | None = None) -> Partition:
    found = partition(
        graph, devices=NUM_RANKS, device_memory=budget, machine=MACHINE, time_limit=240
    )
    check(graph, found)
    return found


def split_weights(graph: StepGraph, found: Partition) -> set[str]:
    return {
        name
        for name in WEIGHTS
        for storage, placement in zip(graph.storages, found.placements, strict=True)
        if storage.name == f"{name}.weight" and any(placement)
    }


def bytes_of_weights(graph: StepGraph) -> int:
    return sum(each.num_bytes for each in graph.storages if each.name.endswith("weight"))


def test_a_block_is_split_by_batch_and_at_rest_where_memory_is_short():
    # Of 4 samples a rank, splits along weights within pairs of ranks exchange less.
    graph = capture_block(16 * NUM_RANKS, 256)
    loose = split_over(graph)
    assert split_weights(graph, loose) == set()
    assert loose.exchanged_bytes < 2 * bytes_of_weights(graph)
    for operator, letters in zip(graph.operators, loose.splits, strict=True):
        if operator.target == "aten._scaled_dot_product_flash_attention_for_cpu.default":
            assert set(letters) == {"b"}
    tight = split_over(graph, int(1.02 * loose.frontier[0].peak_device_bytes))
    assert split_weights(graph, tight) == set(WEIGHTS)
    assert tight.peak_device_bytes < loose.peak_device_bytes
    assert tight.exchanged_bytes > loose.exchanged_bytes


def test_a_block_of_one_sample_is_split_along_its_weights():
    graph = capture_block(1, 16)
    found = split_over(graph)
    assert split_weights(graph, found) == set(WEIGHTS)
    assert found.exchanged_bytes < bytes_of_weights(graph) / 16  # activations, and no weight
