"""Micro-batches: chunks of several jobs back to back as one row of tokens, without padding.

A chunk's block has its samples and up to 15 rows of filler, so that the next one begins at a
multiple of 64 bytes whatever a row has: library products may round otherwise for another alignment.
More filler at the end brings the rows to a number of which the products are known to keep their
bits. Filler has token 0, position 0, no attention and no target: its gradients are zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.lora._adapters import Adapter, AdapterRows
from penstock.lora.jobs._data import IGNORED, TokenSample

BLOCK_ROWS = 16
"""Rows to whose multiple a chunk's block is filled: 64 bytes of float32 for any width."""


def round_up(number: int, multiple: int) -> int:
    """Return the least multiple that is not below a number."""
    return -(-number // multiple) * multiple


@dataclass(eq=False)
class TokenChunk:
    """Consecutive samples of one update of one job: the unit that is packed.

    Attributes:
        job: Name of the job.
        number: Place among the chunks of the update.
        samples: The samples, in the job's order.
        adapters: By layer the job's adapter, as leaves of this chunk alone that share the storage
            of the job's parameters.
        seeds: By layer the seed of the chunk's dropout masks.
    """

    job: str
    number: int
    samples: Sequence[TokenSample]
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return sum(sample.num_tokens for sample in self.samples)

    @property
    def num_rows(self) -> int:
        """Rows of the block: the tokens, and filler."""
        return round_up(self.num_tokens, BLOCK_ROWS)


@dataclass(frozen=True)
class LayerUse:
    """Adapters of one layer in a micro-batch, with their rows and seeds: int64, one by adapter."""

    adapters: list[Adapter]
    rows: AdapterRows
    seeds: Tensor


class MicroBatch:
    """Chunks with their places in a row of tokens.

    Attributes:
        num_rows: Tokens and filler.
        tokens: Token numbers, int64 of shape `(1, num_rows)`.
        positions: Positions, which begin anew in each sample; of the same shape.
        runs: Lengths of the runs of rows, each with whether it is a sample.
        layers: By layer the adapters that it has here.
    """

    def __init__(
        self, chunks: Sequence[TokenChunk], num_rows: int, device: torch.device | str = "cpu"
    ) -> None:
        self.chunks, self.num_rows = chunks, num_rows
        self.starts: list[int] = []
        self.runs: list[tuple[int, bool]] = []
        tokens = torch.zeros(1, num_rows, dtype=torch.int64, device="cpu")
        positions = torch.zeros_like(tokens)
        row = 0
        for chunk in chunks:
            self.starts.append(row)
            for sample in chunk.samples:
                end = row + sample.num_tokens
                tokens[0, row:end] = sample.tokens
                positions[0, row:end] = torch.arange(sample.num_tokens, device="cpu")
                self.runs.append((sample.num_tokens, True))
                row = end
            row = self._fill_to(row, self.starts[-1] + chunk.num_rows)
        assert row <= num_rows, "chunks are above the rows of their micro-batch"
        self._fill_to(row, num_rows)
        self.tokens, self.positions = tokens.to(device), positions.to(device)
        self.layers = self._group_by_layer()

    def _fill_to(self, row: int, end: int) -> int:
        if end > row:
            self.runs.append((end - row, False))
        return end

    def _group_by_layer(self) -> dict[str, LayerUse]:
        layers: dict[str, LayerUse] = {}
        grouped: dict[tuple[int, ...], AdapterRows] = {}
        for name in {name: None for chunk in self.chunks for name in chunk.adapters}:
            has = tuple(i for i, chunk in enumerate(self.chunks) if name in chunk.adapters)
            if has not in grouped:
                grouped[has] = AdapterRows(
                    num_rows=self.num_rows,
                    counts=tuple(self.chunks[i].num_rows for i in has),
                    starts=tuple(self.starts[i] for i in has),
                )
            layers[name] = LayerUse(
                adapters=[self.chunks[i].adapters[name] for i in has],
                rows=grouped[has],
                seeds=torch.tensor([self.chunks[i].seeds[name] for i in has], device="cpu"),
            )
        return layers

    def split(self, matrix: Tensor) -> list[Tensor]:
        """Return the rows of each chunk's tokens.

        Args:
            matrix: Shape `(num_rows, columns)`.
        """
        sizes, picked = [], []
        for chunk, start in zip(self.chunks, self.starts, strict=True):
            before = start - sum(sizes)
            picked.append(len(sizes) + 1)
            sizes += [before, chunk.num_tokens]
        parts = matrix.split([*sizes, self.num_rows - sum(sizes)])
        return [parts[i] for i in picked]


def join_targets(chunk: TokenChunk, device: torch.device | str) -> Tensor:
    """Return the targets of a chunk's tokens, int64 of shape `(num_tokens,)`."""
    return torch.cat([sample.targets for sample in chunk.samples]).to(device)


def count_targets(chunks: Sequence[TokenChunk]) -> int:
    """Return the positions of some chunks that have a target."""
    return sum(
        int((sample.targets != IGNORED).sum()) for chunk in chunks for sample in chunk.samples
    )
