"""Results lie where the real kernels lay them: kernels that read them differ by that."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from penstock.graph.capturing._fake_results import run_fake

aten = torch.ops.aten
# Contiguous, with the channels last, and for some sizes in neither format.
PICTURES = {
    1: ((8, 1, 1, 1), (8, 1, 8, 8)),
    3: ((72, 9, 3, 1), (72, 1, 24, 8), (9, 18, 3, 1), (144, 18, 6, 2)),
}
ROWS = (24, 4, 1), (24, 1, 6)


def tensor(shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(shape, strides).fill_(1.0)


def calls() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Operators with operands of all layouts, also where sizes of one make them all contiguous."""
    eight, options = torch.ones(8), (True, 1e-5, [True] * 3)
    for size, layouts in PICTURES.items():
        shape = (2, 8, size, size)
        for one in (tensor(shape, each) for each in layouts):
            yield aten.native_batch_norm.default, (one, *(eight,) * 4, True, 0.1, 1e-5)
            yield aten.native_dropout.default, (one, 0.5, True)
            yield aten.gelu.default, (one,)
            yield aten.mul.Tensor, (one, torch.ones(8, 1, 1))
        for one, other in product((tensor(shape, each) for each in layouts), repeat=2):
            yield aten.native_batch_norm_backward.default, (one, other, *(eight,) * 5, *options)
            yield aten.add.Tensor, (one, other)
            yield aten.gelu_backward.default, (one, other)
            statistics = torch.ones(2, 2), torch.ones(2, 2), eight
            sizes = (2, 8, size * size, 2, [True] * 3)
            if size > 1:
                yield aten.native_group_norm_backward.default, (one, other, *statistics, *sizes)
    for one, other in product((tensor((2, 6, 4), each) for each in ROWS), repeat=2):
        weight, statistic = torch.ones(4), torch.ones(2, 6, 1)
        rest = ([4], statistic, statistic, weight, weight, [True] * 3)
        yield aten.native_layer_norm_backward.default, (one, other, *rest)
        yield aten.native_layer_norm.default, (one, [4], weight, weight, 1e-5)


@pytest.mark.parametrize(
    ("func", "args"),
    [pytest.param(*call, id=f"{call[0]}-{number}") for number, call in enumerate(calls())],
)
def test_strides_are_those_of_the_kernel(func, args):
    with torch._C._AutoDispatchBelowAutograd():
        real = func(*args)
        with FakeTensorMode() as mode:
            fakes = tree_map_only(torch.Tensor, mode.from_tensor, args)
            fake, _ = run_fake(func, fakes, {})
    if isinstance(real, tuple):
        real, fake = real[0], fake[0]
    assert fake.stride() == real.stride()
