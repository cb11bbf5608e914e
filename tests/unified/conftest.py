"""Tests without the mark `gpu` are about the CPU, on machines with a GPU too."""

import pytest
import torch

from penstock.unified import _devices


@pytest.fixture(autouse=True)
def _rows_go_to_the_cpu(request, monkeypatch):
    if request.node.get_closest_marker("gpu") is None:
        resolve = _devices.resolve_device
        for module in ("_unify", "_tensor"):
            monkeypatch.setattr(
                f"penstock.unified.{module}.resolve_device",
                lambda device: torch.device("cpu") if device is None else resolve(device),
            )
