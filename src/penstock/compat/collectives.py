"""Private names of torch's process groups."""

from __future__ import annotations

from torch import distributed


def count_collectives() -> int | None:
    """Return how many collectives this process has begun, in all its process groups.

    Receiving from one rank counts with some backends only.

    Returns:
        None if a backend does not count them.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0
    count = 0
    for group in distributed.distributed_c10d._world.pg_map:  # pyright: ignore
        for device in group._device_types:
            try:
                count += group._get_backend(device)._get_sequence_number_for_group()  # pyright: ignore
            except RuntimeError:
                return None
    return count
