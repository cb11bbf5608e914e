"""A pool that knows its length only, and the selectors that are tested on it."""

import torch

from penstock.kv.selectors import Accumulated, ChannelCalibration, DoubleSparsity, Nosa, Window

BATCH, HEADS, GROUP, DIM, BLOCK = 2, 2, 3, 8, 32


class FakePool:
    """Counts of full blocks, as much of a pool as selectors may ask for."""

    def __init__(self, num_blocks: int, block_tokens: int = BLOCK):
        self.block_tokens = block_tokens
        self._num_blocks = num_blocks

    def num_blocks(self, layer: int) -> int:
        return self._num_blocks

    def length(self, layer: int) -> int:
        return self._num_blocks * self.block_tokens + 1


def draw_keys(num_blocks, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, HEADS, num_blocks, BLOCK, DIM, generator=generator)


def draw_query(seed=1, num_tokens=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, HEADS * GROUP, num_tokens, DIM, generator=generator)


def calibrated(num_channels):
    calibration = ChannelCalibration()
    keys = draw_keys(4, seed=7).flatten(2, 3)
    generator = torch.Generator().manual_seed(8)
    calibration.note(0, torch.randn(BATCH, HEADS * GROUP, 128, DIM, generator=generator), keys)
    return calibration.channels(num_channels)


SELECTORS = {
    "window": lambda **budget: Window(**budget),
    "double_sparsity": lambda **budget: DoubleSparsity(calibrated(4), **budget),
    "double_sparsity_max": lambda **budget: DoubleSparsity(calibrated(4), reduce="max", **budget),
    "double_sparsity_4bit": lambda **budget: DoubleSparsity(calibrated(4), bits=4, **budget),
    "nosa": lambda **budget: Nosa(bits=None, **budget),
    "nosa_4bit": lambda **budget: Nosa(**budget),
    "accumulated": lambda **budget: Accumulated(**budget),
}
