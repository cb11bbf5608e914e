"""A model that trains while something goes wrong, and what is to be expected of it."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch
from torch import nn

import penstock
from _waiting import wait_until
from penstock.activations import Offload
from penstock.memory import FileStore, Tier

E = TypeVar("E", bound=BaseException)
KIB, MIB = 1024, 1024**2
WIDTH = 256
BATCH = 256
ACTIVATION_BYTES = BATCH * WIDTH * 4
NUM_LAYERS = 8
SAVED_BYTES = (2 * NUM_LAYERS + 1) * ACTIVATION_BYTES  # the input, and two of each layer


@functools.cache
def model() -> nn.Sequential:
    """Eight layers that save seventeen activations of 256 KiB; never trained."""
    torch.manual_seed(0)
    layers = [(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(NUM_LAYERS)]
    return nn.Sequential(*(module for layer in layers for module in layer))


def forward() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return model()(torch.randn(BATCH, WIDTH, generator=generator)).square().mean()


def gradients(loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model().parameters())))


@functools.cache
def expected() -> list[torch.Tensor]:
    return gradients(forward())


def equal(found: list[torch.Tensor]) -> bool:
    return all(torch.equal(ours, stock) for ours, stock in zip(found, expected(), strict=True))


@contextlib.contextmanager
def offloading(store: str | os.PathLike[str] | FileStore, **options: object) -> Iterator[Offload]:
    """Everything leaves; afterwards nothing may be left of it in any tier, whatever happened."""
    expected()
    offload = penstock.offload(store, **{"policy": "all", "min_bytes": "4KiB", **options})
    try:
        with offload:
            yield offload
    finally:
        gc.collect()
        wait_until(lambda: offload.ledger.resident(Tier.FILE) == 0)
        offload.close()
    assert offload.ledger.resident(Tier.DEVICE) == 0


def all_written(offload: Offload, num_bytes: int = SAVED_BYTES) -> None:
    """Wait until all that one forward pass saves is in the file."""
    wait_until(lambda: offload.ledger.resident(Tier.FILE) >= num_bytes)


def error_of(kind: type[E], call: Callable[..., object], *arguments: object) -> E:
    """The error that `call` must raise, without the frames that would keep a graph alive."""
    try:
        call(*arguments)
    except kind as error:
        link: BaseException | None = error
        while link is not None:
            link.__traceback__ = None
            link = link.__cause__ or link.__context__
        return error
    pytest.fail(f"did not raise {kind.__name__}")


def stopped(offload: Offload) -> bool:
    return offload.report().reason.startswith("offloading stopped")


def steps_until_stopped(offload: Offload) -> None:
    """Right numbers before the store fails, while it does and afterwards."""
    assert equal(gradients(forward()))
    wait_until(lambda: stopped(offload))
    for _ in range(2):
        assert equal(gradients(forward()))
