"""The state of the random numbers that programs draw, which some calls must not use up."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

_CPU = torch.device("cpu")


def random_state(device: torch.device) -> Tensor:
    """Return the state of the random numbers that modules draw for a device."""
    state = torch.get_rng_state()
    if device.type != "cuda":
        return state
    return torch.cat([state, torch.cuda.get_rng_state(device)])


def keep_random_state(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a context at whose end torch's numbers go on as if none had been drawn in it."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


@contextlib.contextmanager
def keep_all_random_states(device: torch.device = _CPU) -> Iterator[None]:
    """Let the random numbers of torch, NumPy and Python go on as if none had been drawn."""
    # What seeds NumPy mostly uses its legacy state.
    numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        with keep_random_state(device):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
