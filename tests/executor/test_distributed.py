"""Two processes over gloo: each runs its own plan, and gradients are averaged within it."""

import json
import textwrap

import pytest
import torch

from _ranks import needs_gloo, outputs_of_ranks
from penstock.executor import average_gradients

CHILD = """
import json, sys
import torch
from torch import distributed, nn
from _ranks import leave
from penstock.executor import average_gradients, bind
from penstock.graph import capture
from penstock.planner import plan

rank, port, arm, store = int(sys.argv[1]), *sys.argv[2:]
distributed.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
)
torch.set_num_threads(1)
loss_of = lambda output, batch: (output - batch).square().mean()

def trainee():
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(16, 16), nn.Tanh())))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

batches = torch.randn(5, 8, 16, generator=torch.Generator().manual_seed(rank))
model, optimizer = trainee()
if arm == "planned":
    clip = lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    before_step = lambda: (average_gradients(model), clip())
    graph = capture(model, optimizer, batches[0], loss=loss_of, before_step=before_step)
    full = plan(graph, machine="h200", time_limit=0.3, seed=rank)
    found = plan(
        graph, device_memory=full.peak_device_bytes * (6 + rank) // 8, store=store,
        machine="h200", time_limit=0.3, seed=rank,
    )
    assert found.transfers
    with bind(found, model, optimizer, graph=graph, loss=loss_of, store=store, debug=True) as step:
        losses = [step(batch).item() for batch in batches]
else:
    wrapped = nn.parallel.DistributedDataParallel(model)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(wrapped(batch), batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
weights = [p.detach().flatten().tolist() for p in model.parameters()]
print(json.dumps({"losses": losses, "weights": weights}))
leave()
"""


def two_ranks(arm, store):
    outputs = outputs_of_ranks(["-c", textwrap.dedent(CHILD)], arm, store)
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@needs_gloo
def test_two_ranks_with_different_plans_train_as_ddp_does(store):
    planned = two_ranks("planned", store)
    assert planned == two_ranks("ddp", store)
    assert planned[0]["losses"] != planned[1]["losses"]
    assert planned[0]["weights"] == planned[1]["weights"]


def test_without_ranks_there_is_nothing_to_average():
    with pytest.raises(ValueError, match="init_process_group"):
        average_gradients(torch.nn.Linear(2, 2))
