"""DDP and FSDP2 over gloo, two processes under torchrun: each rank offloads what it computes."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from fork_servers import find_python

pytest.importorskip("torch.distributed.fsdp", reason="this torch was built without distributed")
if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

WORKER = Path(__file__).with_name("distributed_worker.py")
NUM_RANKS = 2
NUM_STEPS = 4
WEIGHT_BYTES = 256 * 512 * 4
CASES = [
    "ddp",
    "fsdp2",
    "fsdp2 kept",
    "fsdp2 checkpoint",
    "fsdp2 bfloat16",
    "fsdp2 frozen",
    "tensor parallel",
]


@pytest.fixture(scope="module")
def results(real_disk: Path) -> list[dict[str, Any]]:
    """Results of each rank, by case: all cases share one start of torchrun, which takes longest."""
    with tempfile.TemporaryDirectory(prefix="penstock-test-", dir=real_disk) as temporary:
        output, store = Path(temporary, "output"), Path(temporary, "store")
        output.mkdir()
        store.mkdir()
        source = str(Path(penstock.__file__).parent.parent)
        search = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
        launch = [find_python("dynamo"), "-m", "torch.distributed.run", "--standalone"]
        ended = subprocess.run(
            [*launch, f"--nproc-per-node={NUM_RANKS}", str(WORKER), str(output), str(store)],
            env={**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr[-4000:]
        assert not list(store.iterdir())
        return [json.loads((output / f"rank{r}.json").read_text()) for r in range(NUM_RANKS)]


@pytest.mark.parametrize("case", CASES)
def test_case(results, case):
    for rank in range(NUM_RANKS):
        seen = results[rank][case]
        assert "error" not in seen, seen["error"]
        assert not any(word in seen["reason"] for word in ("stopped", "stay:")), seen["reason"]
        assert seen["num_compared"] > NUM_STEPS
        assert seen["num_different"] == 0
        assert seen["num_steps"] == NUM_STEPS
        assert seen["offloaded_bytes"] > 0
        assert seen["bytes_read"] > 0
        # One saved weight, gathered or sharded, would weigh more than all activations of a step.
        assert seen["saved_bytes"] < NUM_STEPS * WEIGHT_BYTES / 2


def test_activations_that_are_dtensors_leave(results):
    """Each rank has the half of a layer's hidden activations, and all of the others."""
    for result in results:
        assert result["tensor parallel"]["offloaded_bytes"] > result["ddp"]["saved_bytes"] / 2


def test_every_case_ran(results):
    assert all(list(result) == CASES for result in results)
