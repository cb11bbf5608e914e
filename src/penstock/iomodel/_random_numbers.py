"""The state of the random numbers that modules draw."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def random_state(device: torch.device) -> Tensor:
    """Return the state of the random numbers that modules draw for a device."""
    state = torch.get_rng_state()
    if device.type != "cuda":
        return state
    return torch.cat([state, torch.cuda.get_rng_state(device)])


def keep_random_state(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a context at whose end random numbers go on as if none had been drawn in it."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])
