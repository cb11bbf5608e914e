"""Steps of GPUs are captured and planned where there is none: tensors without data pretend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from penstock.codegen import find_compiler

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or find_compiler() is None,
    reason="there is a GPU, or no C++ compiler",
)
SOURCE = Path(__file__).with_name("pretend_cuda.cpp")

PROGRAM = """
import contextlib, ctypes, json, sys
from unittest import mock
library = ctypes.CDLL(sys.argv[1])
import torch
library.pretend()
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
import penstock, penstock.errors

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
    def again(self, x):
        return nn.functional.dropout(self.first(x).relu())
    def forward(self, x):
        return self.second(checkpoint(self.again, x, use_reentrant=False)).square().mean()

with torch.device("meta"):
    model = Model()
with FakeTensorMode():
    batch = torch.empty(32, 64, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
pretended = {"device": lambda number: contextlib.nullcontext(), "_initialized": True}
pretended |= {"device_count": lambda: 1, "current_device": lambda: 0}
with mock.patch.multiple(torch.cuda, **pretended):
    graph = penstock.capture(model, optimizer, batch)
    model.second = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64, momentum=None)).to("meta")
    try:
        penstock.capture(model, torch.optim.SGD(model.parameters()), batch)
    except penstock.errors.CaptureError as error:
        refusal = str(error)
full = penstock.plan(graph, machine="h200", time_limit=0.5)
half = full.peak_device_bytes // 2
plan = penstock.plan(graph, device_memory=half, machine="h200", time_limit=0.5)
print(json.dumps({
    "device": graph.device,
    "refusal": refusal,
    "states": [list(o.args[-1:]) for o in graph.operators if "get_rng_state" in o.target],
    "restored": [o.args[-1] for o in graph.operators if "set_rng_state" in o.target],
    "targets": [o.target for o in graph.operators],
    "aligned": all(s.num_bytes % 512 == 0 for s in graph.storages),
    "moved": sum(plan.bytes_moved.values()) > 0 or len(plan.order) > len(graph.operators),
}, default=str))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Torch's hooks for GPUs, compiled."""
    home = Path(torch.__file__).parent
    path = tmp_path_factory.mktemp("pretend") / "pretend_cuda.so"
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-I{home}/include", f"-L{home}/lib"]
    libraries = [f"-Wl,-rpath,{home}/lib", "-lc10", "-ltorch_cpu"]
    command = [*find_compiler().split(), *flags, str(SOURCE), "-o", str(path), *libraries]
    subprocess.run(command, check=True, timeout=120)
    return path


def test_a_model_without_memory_is_captured_for_the_device_of_its_batch(library):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(library)],
        check=True,
        timeout=120,
        stdout=subprocess.PIPE,
        env=os.environ
        # Lightning, once imported, has torch ask NVML whether there is a GPU.
        | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTORCH_NVML_BASED_CUDA_CHECK": "0"},
        text=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["device"] == "cuda"
    assert "batch norm 'second.1' with momentum=None reads its count" in found["refusal"]
    assert found["aligned"] and found["moved"]
    assert any(target.startswith("aten._foreach_") for target in found["targets"])
    # What a checkpoint draws again is what it drew: of the GPU's generator, and not the CPU's.
    assert ["cuda"] in found["states"]
    assert "cuda" in found["restored"]
