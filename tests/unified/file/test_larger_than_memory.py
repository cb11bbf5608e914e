"""Tables of twice the memory that a process may have are trained in files, to the same loss.

The limit is RLIMIT_DATA, in a process of its own. Linux counts against it every private page that a
process may write to, whether it was touched or not: the heap, anonymous mappings, stacks. A table
in memory is one of those, and so would be any hidden copy of a table: the mapping fails. (RLIMIT_AS
would count the libraries of torch as well, and a control group needs rights that tests lack.) It is
set to what the process has when it is ready to train, and the budget. What the limit would not
count, shared and file-backed pages, is held against the budget by the peak of the resident set.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fork_servers import find_python

BUDGET_BYTES = 48 * 2**20
NUM_ROWS, WIDTH = 3 * 2**17, 64  # rows of 256 bytes: twice the budget

TRAINER = """
import gc, json, resource, sys
import torch
from torch import nn
from penstock.errors import CapacityError
from penstock.unified import empty, optim, unify

where, directory, budget_bytes, num_rows, width = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
torch.set_num_threads(2)


def status(name):  # of /proc/self/status, in bytes
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def train(features, embedding, num_steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2 * width, 32), nn.Sigmoid(), nn.Linear(32, 1))
    dense = torch.optim.Adam(model.parameters(), lr=0.01)
    sparse = optim.Adam([embedding], lr=0.05)
    losses, rows = [], torch.empty(0, dtype=torch.int64)
    for _ in range(num_steps):
        # One half is new, the other half has been used, so that what was written is read again.
        new = torch.randint(0, len(features), (1024,))
        rows = torch.cat([new, rows[:1024]])
        inputs = torch.cat([features[rows], embedding[rows]], dim=1)
        loss = (model(inputs)[:, 0] - rows.remainder(2)).square().mean()
        loss.backward()
        for optimizer in (dense, sparse):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, embedding.detach()[rows]


# Once with small tables: what is built, opened and started on first use is there afterwards.
train(unify(f"{directory}/small.npy"), empty((99, width), path=f"{directory}/warm-{where}",
      requires_grad=True), 2)
train(unify(torch.zeros(99, width)), empty((99, width), requires_grad=True), 2)
gc.collect()
shape, seen = (num_rows, width), {}
if where == "file":
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + budget_bytes,) * 2)
    for name, make in [("table", lambda: empty(shape)), ("tensor", lambda: torch.empty(shape)),
                       ("copy", lambda: unify(torch.zeros(1, width).expand(shape)))]:
        try:
            make()
            seen[name] = "was made"
        except (CapacityError, RuntimeError) as error:
            seen[name] = f"{type(error).__name__}: {error}"
    before = status("VmRSS")
    features = unify(f"{directory}/features.npy", cache=budget_bytes // 8)
    embedding = empty(shape, path=f"{directory}/embedding", requires_grad=True)
else:
    before = status("VmRSS")
    features = unify(torch.from_numpy(__import__("numpy").load(f"{directory}/features.npy")))
    embedding = empty(shape, requires_grad=True)
losses, rows = train(features, embedding, 12)
seen |= {"losses": losses, "rows": rows.tolist(), "grown_bytes": status("VmHWM") - before}
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def directory(real_disk: Path, tmp_path_factory) -> Path:
    """Holds the features, which this process does not hold in memory either."""
    directory = tmp_path_factory.mktemp("larger")
    np.save(directory / "small.npy", np.ones((99, WIDTH), dtype=np.float32))
    shape = (NUM_ROWS, WIDTH)
    features = np.lib.format.open_memmap(
        directory / "features.npy", "w+", dtype=np.float32, shape=shape
    )
    random = np.random.default_rng(0)
    for start in range(0, NUM_ROWS, 2**16):
        features[start : start + 2**16] = random.random((2**16, WIDTH), dtype=np.float32)
    features.flush()
    assert features.nbytes == 2 * BUDGET_BYTES
    return directory


def train(where: str, directory: Path) -> dict[str, Any]:
    sizes = map(str, (BUDGET_BYTES, NUM_ROWS, WIDTH))
    done = subprocess.run(
        [find_python("torch"), "-c", TRAINER, where, str(directory), *sizes],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_table_of_twice_the_budget_trains_as_in_memory(directory):
    in_file, in_memory = train("file", directory), train("memory", directory)
    assert in_file["losses"] == pytest.approx(in_memory["losses"], rel=1e-6)
    assert np.allclose(in_file["rows"], in_memory["rows"], rtol=1e-6, atol=1e-7)
    assert in_file["losses"][-1] < in_file["losses"][0]
    assert in_file["grown_bytes"] < BUDGET_BYTES
    assert in_memory["grown_bytes"] > 4 * BUDGET_BYTES
    # The limit is one: the same table in memory, a plain tensor of its size, a copy of one.
    assert in_file["table"].startswith("CapacityError: a table of 96.00 MiB does not fit into mem")
    assert 'keep the table in a file: penstock.unify("table.npy")' in in_file["table"]
    assert in_file["copy"].startswith("CapacityError: a table of 96.00 MiB does not fit into mem")
    assert in_file["tensor"].startswith("RuntimeError") and "memory" in in_file["tensor"]
