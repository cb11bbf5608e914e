"""Models that do what a capture can easily get wrong."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from _steps import Case
from _zoo import IDS

ROWS = torch.linspace(-2, 2, 32).reshape(4, 8).cos()


class Checkpointed(nn.Module):
    """Dropout in a part that is recomputed: it has to draw the same numbers again."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first = nn.Linear(8, 8)
        self.part = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.part, self.first(x), use_reentrant=self.use_reentrant)
        return F.dropout(y, 0.2).square().mean()


class MixedPrecision(nn.Module):
    """bfloat16 by autocast, which casts each weight once for two uses; a ReLU in place."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(inplace=True), nn.LayerNorm(16), nn.Linear(16, 8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.part(x) + self.part(x + 1)
        return F.mse_loss(y.float(), x)


class Aliases(nn.Module):
    """Tied weights, buffers changed and replaced, views written in place, a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 8)
        self.head = nn.Linear(8, 100, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(8))
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.long))
        self.positions = torch.arange(8.0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) * self.scale * self.frozen + self.positions
        self.average = 0.9 * self.average + 0.1 * x.detach().mean((0, 1))
        self.num_calls += 1
        x[..., 0] += self.average.sum()
        x.transpose(1, 2).mul_(2)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class OneBlock(nn.Module):
    """Two parameters that are parts of one storage, as some libraries flatten them."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.linspace(-1, 1, 40)
        self.first = nn.Parameter(flat[:16].view(4, 4))
        self.second = nn.Parameter(flat[16:32].view(4, 4))

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return (left @ self.first @ self.second.t() - right).square().sum()


class PicturesOfOne(nn.Module):
    """Pictures of one pixel: strides of any layout are contiguous, and kernels differ by them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(220, 220)
        self.first, self.second = nn.Conv2d(220, 220, 1), nn.Conv2d(220, 220, 1)
        self.norm, self.last = nn.BatchNorm2d(220), nn.BatchNorm2d(220)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 220).reshape(220, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        pixels = self.linear(x.permute(0, 2, 3, 1).reshape(len(x), 1, 220))
        x = x + self.scale * pixels.reshape(len(x), 1, 1, 220).permute(0, 3, 1, 2)
        x = x + self.scale * self.second(F.gelu(self.norm(x)))
        return self.last(x).cos().mean()


CASES = {
    "checkpointed": Case(lambda: Checkpointed(False), ROWS),
    "checkpointed, reentrant": Case(lambda: Checkpointed(True), ROWS.clone().requires_grad_()),
    "mixed precision": Case(MixedPrecision, ROWS),
    "aliases": Case(Aliases, IDS),
    "pictures of one": Case(PicturesOfOne, torch.linspace(-2, 2, 660).sin().reshape(3, 220, 1, 1)),
    "one block": Case(OneBlock, (ROWS[:, :4], ROWS[:, 4:])),
}
