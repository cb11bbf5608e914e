"""Seeds from names and counts alone, so that a job draws the same beside any neighbours."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """Return 63 bits that are the same in every process for the same parts.

    Args:
        parts: Numbers and names that set this seed apart from others; their order counts.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
