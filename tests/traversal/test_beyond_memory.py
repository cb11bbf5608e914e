"""Layer-wise inference over features of twice the memory that a process may have.

The limit is RLIMIT_DATA, against which Linux counts every private page that a process may write to;
see `tests/unified/file/test_larger_than_memory.py`. It is set when libraries are imported and all
has run once.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fork_servers import find_python

BUDGET_BYTES = 16 * 2**20
NUM_NODES, WIDTH, NUM_EDGES = 2**17, 64, 2**17  # features of twice the budget

PROGRAM = """
import gc, json, resource, sys
import torch
from pathlib import Path
from penstock.traversal import CSRGraph, infer_layers
from penstock.unified import unify

where, directory, budget_bytes = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)


def status(name):  # of /proc/self/status, in bytes
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def make_layers():
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(128, width, generator=generator) / 11 for width in (64, 4)]

    def layer(weight, x, edges):  # GraphSAGE with means
        sums = torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]])
        degrees = torch.bincount(edges[1], minlength=len(x)).clamp(min=1)
        return torch.cat([x, sums / degrees[:, None]], dim=1) @ weight

    first, last = weights
    return [lambda x, e: layer(first, x, e).relu(), lambda x, e: layer(last, x, e)]


layers = make_layers()
if where == "memory":
    graph = CSRGraph(*(torch.load(directory / f"{name}.pt") for name in ("indptr", "indices")))
    features = torch.from_numpy(__import__("numpy").load(directory / "features.npy"))
    out = infer_layers(graph, features, layers, max_bytes="64MiB")
    torch.save(out, directory / "expected.pt")
    sys.exit()


def run(graph, features, store):
    store.mkdir()
    return infer_layers(graph, features, layers, max_bytes=budget_bytes // 8, store=store)


small = CSRGraph([0, 1, 2], [1, 0]).save(directory / "small")
unify(torch.zeros(2, 64)).save_rows(directory / "small.npy")
run(small, directory / "small.npy", directory / "small-store")  # what is started once is there
gc.collect()
resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + budget_bytes,) * 2)
seen = {}
try:
    torch.empty(2 * budget_bytes // 4)
    seen["tensor"] = "was made"
except RuntimeError:
    seen["tensor"] = "was refused"
before = status("VmRSS")
graph = CSRGraph(directory / "lists" / "indptr.npy", directory / "lists" / "indices.npy")
out = run(graph, directory / "features.npy", directory / "store")
seen["peak"] = status("VmHWM") - before
expected = torch.load(directory / "expected.pt", mmap=True)
worst = 0.0
for begin in range(0, len(out), 2**15):
    end = min(begin + 2**15, len(out))
    found = out[torch.arange(begin, end)]
    worst = max(worst, float((found - expected[begin:end]).abs().max()))
seen["worst"] = worst
print(json.dumps(seen))
"""


def run(directory: Path, where: str) -> Any:
    program = [find_python("torch"), "-c", PROGRAM, where, str(directory), str(BUDGET_BYTES)]
    result = subprocess.run(program, stdout=subprocess.PIPE, text=True, timeout=200)
    assert result.returncode == 0
    return json.loads(result.stdout) if where == "file" else None


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the limits of Linux")
def test_outputs_are_those_in_memory(tmp_path: Path):
    import torch

    from penstock.traversal import CSRGraph

    generator = np.random.default_rng(0)
    features = generator.random((NUM_NODES, WIDTH), dtype=np.float32)
    assert features.nbytes == 2 * BUDGET_BYTES
    np.save(tmp_path / "features.npy", features)
    del features
    edges = torch.from_numpy(generator.integers(0, NUM_NODES, (2, NUM_EDGES)))
    graph = CSRGraph.from_edges(edges, NUM_NODES)
    graph.save(tmp_path / "lists")
    for name in ("indptr", "indices"):
        torch.save(getattr(graph, name), tmp_path / f"{name}.pt")
    run(tmp_path, "memory")
    seen = run(tmp_path, "file")
    assert seen["tensor"] == "was refused"
    assert seen["worst"] <= 1e-6
    assert seen["peak"] <= BUDGET_BYTES
