"""Devices that operators run on: their memory, their copies and their order."""

from __future__ import annotations

import torch

from penstock.errors import GraphFileError
from penstock.executor.device._cuda import CudaDevice
from penstock.executor.device.base import Device
from penstock.graph import StepGraph


def device_of(graph: StepGraph) -> Device:
    """Return the device that a step was captured for.

    Raises:
        GraphFileError: This machine does not have it.
    """
    if graph.device == "cpu":
        return Device()
    if graph.device == "cuda" and torch.cuda.is_available():
        return CudaDevice()
    raise GraphFileError(
        f"the graph is of a step on {graph.device!r}, and there is no such device here: capture "
        "the step with the model where it shall train"
    )
