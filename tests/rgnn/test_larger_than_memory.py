"""A step runs where PyG's `FastRGCNConv`, which gathers a weight for each edge, has no memory.

The limit is RLIMIT_DATA, in a process of its own: Linux counts against it every private page that a
process may write to, whether it was touched or not. It is set to what the process has when it is
ready, and a budget of a quarter of the gathered weights.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fork_servers import find_python

NUM_EDGES, WIDTH = 20_000, 64
GATHERED_BYTES = NUM_EDGES * WIDTH * WIDTH * 4
BUDGET_BYTES = GATHERED_BYTES // 4

TRAINER = """
import gc, json, resource, sys
import torch
from torch_geometric.nn import FastRGCNConv
from penstock import rgnn

num_edges, width, budget_bytes = map(int, sys.argv[1:])
num_nodes, num_relations = 4000, 50
torch.set_num_threads(2)
torch.manual_seed(0)
edge_index = torch.randint(num_nodes, (2, num_edges))
edge_type = torch.randint(num_relations, (num_edges,))
x = torch.randn(num_nodes, width)


def step(layer):
    layer.zero_grad()
    h = layer(x, edge_index.clone(), edge_type)  # of which a graph is made anew
    h.square().mean().backward()
    return [h.detach(), *(parameter.grad.clone() for parameter in layer.parameters())]


theirs = FastRGCNConv(width, width, num_relations)
ours = rgnn.RGCNConv(width, width, num_relations)
ours.load_state_dict(theirs.state_dict())
expected = step(theirs)
seen = {"difference": max(float((a - b).abs().max()) for a, b in zip(step(ours), expected))}
gc.collect()
with open("/proc/self/status") as lines:
    used = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
resource.setrlimit(resource.RLIMIT_DATA, (used + budget_bytes,) * 2)
again = step(ours)
seen["difference_within"] = max(float((a - b).abs().max()) for a, b in zip(again, expected))
try:
    step(theirs)
    seen["theirs"] = "ran"
except RuntimeError as error:
    seen["theirs"] = str(error)
print(json.dumps(seen))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts RLIMIT_DATA like that")
def test_a_step_runs_in_a_quarter_of_what_gathered_weights_take():
    pytest.importorskip("torch_geometric")
    done = subprocess.run(
        [find_python("libraries"), "-c", TRAINER, *map(str, (NUM_EDGES, WIDTH, BUDGET_BYTES))],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).resolve().parents[2] / "src",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout)
    assert f"you tried to allocate {GATHERED_BYTES} bytes" in seen["theirs"]
    assert seen["difference"] < 1e-4
    assert seen["difference_within"] == seen["difference"]
