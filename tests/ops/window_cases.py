"""Windows of every geometry, and filters by their definition over `F.unfold`."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from penstock.ops.windows._geometry import Windows


@dataclasses.dataclass(frozen=True)
class Case:
    """Images, windows and filters."""

    windows: Windows
    samples: int
    groups: int
    channels: int  # of a group
    outs: int
    height: int
    width: int
    is_dynamic: bool = False
    is_moved: bool = False  # whether weights lie as in `LocalConv2d`
    seed: int = 0

    @property
    def out(self) -> tuple[int, int]:
        return self.windows.count_windows(self.height, self.width)

    @property
    def op_groups(self) -> int:
        return 0 if self.is_dynamic else self.groups

    @property
    def options(self) -> dict[str, tuple[int, int]]:
        _, stride, padding, dilation = self.windows
        return {"stride": stride, "padding": padding, "dilation": dilation}

    def draw(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """Return images and weights."""
        generator = torch.Generator().manual_seed(self.seed)
        of_x = (self.samples, self.groups * self.channels, self.height, self.width)
        first = (self.groups * self.outs, self.channels)
        if self.is_dynamic:
            first = (self.samples, self.groups)
        of_weight = (*first, *self.windows.kernel, *self.out)
        x, weight = (
            torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            for shape in (of_x, of_weight)
        )
        return x, weight.movedim(4, 0).contiguous().movedim(0, 4) if self.is_moved else weight


@st.composite
def cases(draw: st.DrawFn, most: int = 20) -> Case:
    """Cases in which a window fits; some without samples or channels, some with one position."""
    small = st.integers(1, 3)
    pairs = st.tuples(small, small)
    windows = Windows(
        draw(st.tuples(small, st.integers(1, 5))),
        draw(pairs),
        draw(st.tuples(st.integers(0, 4), st.integers(0, 4))),
        draw(pairs),
    )
    least = [
        max(1, windows.dilation[k] * (windows.kernel[k] - 1) + 1 - 2 * windows.padding[k])
        for k in range(2)
    ]
    return Case(
        windows=windows,
        samples=draw(st.integers(0, 3) | st.just(6)),
        groups=draw(small),
        channels=draw(small | st.just(5)),
        outs=draw(small),
        height=draw(st.integers(least[0], max(least[0], most))),
        width=draw(st.integers(least[1], max(least[1], most))),
        is_dynamic=draw(st.booleans()),
        is_moved=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
    )


def windows_of(x: Tensor, windows: Windows) -> Tensor:
    """Return `(N, C, Ho, Wo, Fh, Fw)` by `F.unfold`."""
    kernel, stride, padding, dilation = windows
    out = windows.count_windows(*x.shape[2:])
    if x.numel() == 0:  # which `F.unfold` refuses
        return x.sum() + x.new_zeros(*x.shape[:2], *out, *kernel)
    columns = functional.unfold(x, kernel, dilation, padding, stride)
    return columns.view(*x.shape[:2], *kernel, *out).permute(0, 1, 4, 5, 2, 3)


def filter_by_definition(x: Tensor, weight: Tensor, case: Case) -> Tensor:
    """Return the filtered images by products over all windows."""
    found = windows_of(x, case.windows).unflatten(1, (case.groups, case.channels))
    if case.is_dynamic:
        return torch.einsum("ngcijfk,ngfkij->ngcij", found, weight).flatten(1, 2)
    by_group = weight.unflatten(0, (case.groups, case.outs))
    return torch.einsum("ngcijfk,gocfkij->ngoij", found, by_group).flatten(1, 2)


def largest_error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest element, which has a floor."""
    if expected.numel() == 0:
        return 0.0
    expected = expected.double()
    return float((found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-3))
