"""Round trips through a file: noise of any length at an address of choice."""

import numpy as np

from penstock.memory import ExtentFile

BLOCK, MIB = 4096, 2**20
LENGTHS = [1, 511, 512, 4095, 4096, 4097, 4096 + 511, 8191, 8192, MIB + 13, 9 * MIB + 4097]


class Memory:
    """`num_bytes` bytes of memory whose address is `shift` modulo 4096, filled with noise."""

    def __init__(self, num_bytes: int, shift: int = 0, seed: int = 0) -> None:
        self.whole = np.random.default_rng(seed).integers(
            0, 256, num_bytes + 3 * BLOCK, dtype=np.uint8
        )
        start = BLOCK + (shift - self.whole.ctypes.data) % BLOCK
        self.bytes = self.whole[start : start + num_bytes]
        self.address = self.bytes.ctypes.data


def assert_comes_back(file: ExtentFile, num_bytes: int, source_shift: int, target_shift: int):
    """Store and load through `file`; shifts are addresses modulo 4096."""
    source, target = Memory(num_bytes, source_shift, 1), Memory(num_bytes, target_shift, 2)
    expected = target.whole.copy()
    span = file.store(source.address, num_bytes)
    assert span.num_bytes == num_bytes
    assert span.address_offset == source.address % 512
    file.load(span, target.address)
    at = target.address - target.whole.ctypes.data
    expected[at : at + num_bytes] = source.bytes
    assert np.array_equal(target.whole, expected)  # and nothing beside it was touched
    file.discard(span)
    assert file.used_bytes == 0
