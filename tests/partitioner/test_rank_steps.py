"""Ranks' own steps: on any mesh, pieces after a step are those of the whole step's tensors."""

from __future__ import annotations

import pytest

from _ranks import needs_gloo

pytest.importorskip("torch.distributed.tensor", reason="this torch was built without distributed")

import _lockstep
import _rank_cases
from penstock.errors import PlanError
from penstock.graph.bindings import bind_batch, bind_group_tensors, bind_numbers, find_entries
from penstock.graph.fsdp.shards import ShardedModel
from penstock.memory import machine
from penstock.partitioner import partition
from penstock.partitioner._rank import write_rank

CASES = [
    *(
        (name, method, 4)
        for name in ("mlp", "words", "cell", "cnn")
        for method in ("auto", "batch")
    ),
    *(("words", "tensor", 4), ("words", "greedy", 4), ("cnn", "fsdp", 4)),
    *(("words", "auto", 8), ("mlp", "auto", 8), ("words", "fsdp", 2), ("cnn", "greedy", 2)),
]
TOLERANCE = 1e-6  # sums of at most a hundred numbers of at most 1, in another order


@needs_gloo
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_pieces_after_a_step_are_those_of_the_whole(case: tuple[str, str, int]):
    name, method, num_ranks = case
    model, batch, loss = _rank_cases.make(name)
    optimizer = _rank_cases.make_optimizer(model)
    graph = _rank_cases.capture_step(name)
    profile = machine("h100-80gb")
    found = partition(graph, devices=num_ranks, machine=profile, method=method)
    entries = find_entries(graph, model, loss, optimizer, ShardedModel(model))
    tensors = bind_batch(graph, batch) | {each.name: each.take(graph) for each in entries}
    tensors |= bind_group_tensors(graph, optimizer)
    steps, losses, errors = _lockstep.run_ranks(
        graph, found, tensors, bind_numbers(graph, optimizer)
    )
    assert len({each.item() for each in losses}) == 1
    for each in errors:
        assert {
            key: num
            for key, num in (
                (key, error.abs().max().item()) for key, error in each.items() if error.numel()
            )
            if num > TOLERANCE
        } == {}
    counted: dict[str, int] = {}
    for exchange in steps[0].exchanges:
        counted[exchange.kind] = counted.get(exchange.kind, 0) + exchange.num_bytes
    planned = {kind: num_bytes for kind, (_, num_bytes) in found.count_collectives().items()}
    if case == ("cell", "auto", 4):  # traded at two levels at once: here one after the other
        assert counted.pop("all_to_all") == pytest.approx(planned.pop("all_to_all"), rel=1 / 3)
    # Batch norms exchange their statistics otherwise; the greedy split has targets that are split
    # along an axis of which a part is written.
    if name != "cnn" and method != "greedy":
        assert counted == pytest.approx(planned, rel=0.001)


def test_a_partition_for_another_graph_is_refused():
    one, other = (_rank_cases.make_case(name, "batch", 2) for name in ("mlp", "cell"))
    with pytest.raises(PlanError) as raised:
        write_rank(one.graph, other.partition, (0,), ("",))
    assert raised.value.rule == "graph"
