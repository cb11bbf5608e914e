"""Autocast as torch counts it: blocks within blocks, and casts that it keeps until the outermost
one ends.
"""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def outside_autocast(device: str) -> Iterator[None]:
    """Run the block as if it came after all blocks of autocast that are open on this thread.

    `torch.autocast(device, enabled=False)` is one more block: casts of parameters are not dropped
    at the end of those within it, and a checkpoint finds them when it computes again.

    Args:
        device: The type of the device on which autocast is off in the block.
    """
    enabled = torch.is_autocast_enabled(device)
    num_open = torch.autocast_increment_nesting() - 1
    for _ in range(num_open + 1):
        torch.autocast_decrement_nesting()
    if enabled or num_open:
        torch.clear_autocast_cache()
    torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, enabled)
        for _ in range(num_open):
            torch.autocast_increment_nesting()
        if enabled or num_open:
            torch.clear_autocast_cache()
