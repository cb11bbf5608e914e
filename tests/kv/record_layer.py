"""Records of a layer in memory, with queries, and attention over them in float64."""

from __future__ import annotations

import dataclasses

import torch

from penstock.kv._kernel import attend_records

FLOAT, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
TOLERANCE = 4e-6
"""Of values near 1 and log-sum-exps below 10. Records are exact in float64, so what remains are the
sums in float32 of up to some hundred products, each of them rounded by 2**-24."""


@dataclasses.dataclass
class Layer:
    """Records of a layer with queries, and attention by its formula in float64.

    The records lie in memory in another order than their numbers, and hold NaN beyond their counts.
    """

    kv_heads: int = 2
    group: int = 1
    num_tokens: int = 1
    num_records: int = 5
    block_tokens: int = 24
    key_dim: int = 16
    value_dim: int = 16
    batch: int = 2
    dtype: torch.dtype = FLOAT
    counts: torch.Tensor | None = None

    def __post_init__(self) -> None:
        torch.manual_seed(self.key_dim + 100 * self.group + 1000 * self.num_tokens)
        shape = (self.batch, self.kv_heads, self.num_records)
        size = self.block_tokens
        self.query = torch.randn(
            self.batch, self.kv_heads * self.group, self.num_tokens, self.key_dim
        )
        if self.counts is None:
            self.counts = torch.randint(0, size + 1, shape, dtype=torch.int32)
            self.counts[..., 0] = size
        self.is_valid = torch.arange(size) < self.counts[..., None]
        parts = [torch.randn(*shape, size, d) for d in (self.key_dim, self.value_dim)]
        self.keys, self.values = (
            part.to(self.dtype).masked_fill(~self.is_valid[..., None], torch.nan) for part in parts
        )
        places = torch.randperm(self.counts.numel())
        self.memory = torch.empty(
            len(places), size * (self.key_dim + self.value_dim), dtype=self.dtype
        )
        rows = torch.cat([self.keys.flatten(3), self.values.flatten(3)], -1).flatten(0, 2)
        self.memory[places] = rows
        self.addresses = (self.memory.data_ptr() + places * self.memory[0].nbytes).view(shape)

    @property
    def scale(self) -> float:
        return self.key_dim**-0.5

    def attend(self, function=attend_records, **options):
        return function(
            self.query,
            self.addresses,
            self.counts,
            block_tokens=self.block_tokens,
            value_dim=self.value_dim,
            scale=options.pop("scale", self.scale),
            dtype=self.dtype,
            **options,
        )

    def formula(self, *, scale=None, softcap=None, visible=None, bias=None):
        """Output, log-sum-exp and that of each record; mask and bias have one element per score."""
        keys, values = (
            part.double().nan_to_num().flatten(2, 3).repeat_interleave(self.group, 1)
            for part in (self.keys, self.values)
        )
        scores = (self.scale if scale is None else scale) * self.query.double() @ keys.mT
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores = scores + bias.double()
        seen = self.is_valid.flatten(2)[:, :, None].expand(-1, -1, self.num_tokens, -1)
        if visible is not None:
            seen = seen & visible
        scores = scores.masked_fill(~seen.repeat_interleave(self.group, 1), -torch.inf)
        lse = scores.logsumexp(-1)
        out = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp() @ values
        return out, lse, scores.unflatten(-1, (self.num_records, -1)).logsumexp(-1)

    def num_scores(self) -> int:
        return self.num_records * self.block_tokens


def assert_close(found, expected, tolerance: float = TOLERANCE) -> None:
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each.cpu().double(), other, rtol=tolerance, atol=tolerance)
