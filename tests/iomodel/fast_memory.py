"""Schedules that run element by element in a fast memory of a capacity, which counts what moves."""

from __future__ import annotations

import numpy as np


class FastMemory:
    """A fast memory that refuses to hold more than its elements."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.held = capacity, 0
        self.loaded = self.stored = 0

    def take(self, count: int) -> None:
        self.held += count
        assert self.held <= self.capacity, "the schedule does not fit"

    def free(self, count: int) -> None:
        self.held -= count

    def load(self, block: np.ndarray) -> np.ndarray:
        self.take(block.size)
        self.loaded += block.size
        return block.copy()

    def store(self, block: np.ndarray, into: np.ndarray) -> None:
        into[...] = block
        self.stored += block.size
        self.free(block.size)


def spans(length: int, tile: int) -> list[slice]:
    return [slice(first, min(length, first + tile)) for first in range(0, length, tile)]


def multiply(left, right, tiles, memory: FastMemory) -> np.ndarray:
    """The product with a tile of the result that stays."""
    result = np.zeros((len(left), right.shape[1]))
    for i in spans(len(left), tiles["rows"]):
        for j in spans(right.shape[1], tiles["columns"]):
            memory.take(result[i, j].size)
            total = np.zeros(result[i, j].shape)
            for k in range(left.shape[1]):
                column, row = memory.load(left[i, k]), memory.load(right[k, j])
                total += np.outer(column, row)
                memory.free(column.size + row.size)
            memory.store(total, result[i, j])
    return result


def multiply_left(left, right, tile_rows, tile_inner, memory: FastMemory) -> np.ndarray:
    """The product with a tile of the left operand that stays."""
    result = np.zeros((len(left), right.shape[1]))
    for number, k in enumerate(spans(left.shape[1], tile_inner)):
        for i in spans(len(left), tile_rows):
            tile = memory.load(left[i, k])
            for j in range(right.shape[1]):
                row = memory.load(right[k, j])
                if number:
                    total = memory.load(result[i, j])
                else:
                    memory.take(len(tile))
                    total = np.zeros(len(tile))
                memory.store(total + tile @ row, result[i, j])
                memory.free(row.size)
            memory.free(tile.size)
    return result


def attend_flash(q, k, v, tiles, memory: FastMemory) -> np.ndarray:
    out = np.zeros_like(q)
    for i in spans(len(q), tiles["queries"]):
        query = memory.load(q[i])
        rows = len(query)
        memory.take(query.size + 3 * rows)  # the output; largest score, sum and a score for each
        total, largest, sums = np.zeros_like(query), np.full(rows, -np.inf), np.zeros(rows)
        for at in range(len(k)):
            key = memory.load(k[at])
            score = query @ key
            memory.free(key.size)
            value = memory.load(v[at])
            new = np.maximum(largest, score)
            shrink, power = np.exp(largest - new), np.exp(score - new)
            total = total * shrink[:, None] + np.outer(power, value)
            sums, largest = sums * shrink + power, new
            memory.free(value.size)
        memory.store(total / sums[:, None], out[i])
        memory.free(query.size + 3 * rows)
    return out


def attend_two_pass(q, k, v, tiles, memory: FastMemory) -> np.ndarray:
    scores, sums = np.zeros((len(q), len(k))), np.zeros((2, len(q)))
    for i in spans(len(q), tiles["queries"]):
        rows = len(q[i])
        memory.take(2 * rows)
        largest, total = np.full(rows, -np.inf), np.zeros(rows)
        for j in spans(len(k), tiles["keys"]):
            memory.take(scores[i, j].size)
            tile = np.zeros(scores[i, j].shape)
            for feature in range(q.shape[1]):
                column, row = memory.load(q[i, feature]), memory.load(k[j, feature])
                tile += np.outer(column, row)
                memory.free(column.size + row.size)
            new = np.maximum(largest, tile.max(1))
            total = total * np.exp(largest - new) + np.exp(tile - new[:, None]).sum(1)
            largest = new
            memory.store(tile, scores[i, j])
        memory.store(np.stack([largest, total]), sums[:, i])
    out = np.zeros_like(q)
    for i in spans(len(q), tiles["output queries"]):
        for j in spans(q.shape[1], tiles["output features"]):
            largest, total = memory.load(sums[:, i])
            memory.take(out[i, j].size)
            tile = np.zeros(out[i, j].shape)
            for at in range(len(k)):
                column, row = memory.load(scores[i, at]), memory.load(v[at, j])
                tile += np.outer(np.exp(column - largest) / total, row)
                memory.free(column.size + row.size)
            memory.store(tile, out[i, j])
            memory.free(2 * len(largest))
    return out
