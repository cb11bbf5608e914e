"""Choice between fetching keys and values and computing them again from the layer's inputs."""

from __future__ import annotations

import dataclasses
import math

from penstock.tables import Report
from penstock.units import parse_bandwidth


@dataclasses.dataclass(frozen=True)
class RecomputeSplit(Report, title="kv.fetch_or_recompute"):
    """Split of missing tokens: the first are computed again while the others are fetched.

    Attributes:
        num_recomputed: Tokens whose keys and values are computed from the layer's inputs, from the
            beginning of the missing ones; whole blocks, or all.
        num_fetched: Tokens whose keys and values are fetched.
        fetched_bytes: Bytes over the link, inputs included.
        link_seconds: Time at which the last byte is there.
        compute_seconds: Time at which the last keys and values are computed; 0 without any.
        seconds: The later of both.
    """

    num_recomputed: int
    num_fetched: int
    fetched_bytes: int
    link_seconds: float
    compute_seconds: float
    seconds: float


def fetch_or_recompute(
    num_tokens: int,
    *,
    bytes_per_token: int,
    bandwidth: float | str,
    flops_per_token: float,
    flop_rate: float,
    input_bytes_per_token: int = 0,
    block_tokens: int = 64,
    overhead_seconds: float = 0.0,
) -> RecomputeSplit:
    """Split missing tokens so that fetching and computing finish together.

    With n missing tokens in blocks of T, b and x bytes of a token's keys and values and of its
    inputs, f FLOPs, bandwidth B, FLOP rate F and overhead c, recomputing r tokens finishes at

        link(r)    = (x r + b (n - r)) / B                          inputs first
        compute(r) = c + max(x T / B + f r / F, x r / B + f T / F)  block by block, as inputs arrive

    The first falls and the second grows with r, so that the best r is that of the crossing with the
    line of `compute` that is met first, or the block before or after it; r = 0 if x >= b.

    Example:
        >>> split = fetch_or_recompute(
        ...     1024, bytes_per_token=4096, bandwidth="10GB/s", flops_per_token=2**23,
        ...     flop_rate=10e12,
        ... )
        >>> split.num_recomputed, split.num_fetched
        (320, 704)

    Args:
        num_tokens: Missing tokens of a layer.
        bytes_per_token: Bytes of a token's keys and values in the layer, of all KV heads.
        bandwidth: Of the link below the device, measured; bytes per second, or "20GB/s".
        flops_per_token: Of the two projections (and the rotation) of a token:
            4 x hidden size x KV heads x head size, where keys and values are as wide.
        flop_rate: Of these products on the device, measured; FLOPs per second.
        input_bytes_per_token: Bytes of a token's layer input that must be fetched first; 0 if they
            lie on the device.
        block_tokens: Tokens of a block.
        overhead_seconds: Time that computing costs beside its FLOPs.

    Returns:
        The split of least `seconds`; of equals, that which fetches more.

    Raises:
        ValueError: A size is negative or a rate is not above 0.

    Source:
        Jiang et al.: KVPR, arXiv:2411.17089, section 3 (partial recomputation, overlapped); Zhao et
        al.: ALISA, arXiv:2403.17312, section V (recomputation against bytes). Here with inputs that
        arrive by blocks, as computing starts with the first.
    """
    for name, value, least in (
        ("num_tokens", num_tokens, 0),
        ("bytes_per_token", bytes_per_token, 1),
        ("flops_per_token", flops_per_token, 0),
        ("input_bytes_per_token", input_bytes_per_token, 0),
        ("block_tokens", block_tokens, 1),
        ("overhead_seconds", overhead_seconds, 0),
    ):
        if not (math.isfinite(value) and value >= least):
            raise ValueError(f"{name} must be finite and at least {least}; got {value}")
        if name.endswith("tokens") and value != int(value):
            raise ValueError(f"{name} must be a whole number; got {value}")
    if not (math.isfinite(flop_rate) and flop_rate > 0):
        raise ValueError(f"flop_rate must be FLOPs per second above 0; got {flop_rate}")
    times = _Times(
        num_tokens,
        block_tokens,
        fetch=bytes_per_token / parse_bandwidth(bandwidth, name="bandwidth"),
        fetch_input=input_bytes_per_token / parse_bandwidth(bandwidth, name="bandwidth"),
        compute=flops_per_token / flop_rate,
        overhead=overhead_seconds,
    )
    best = min(times.candidates(), key=lambda tokens: (times.seconds(tokens), tokens))
    fetched_bytes = input_bytes_per_token * best + bytes_per_token * (num_tokens - best)
    return RecomputeSplit(
        num_recomputed=best,
        num_fetched=num_tokens - best,
        fetched_bytes=fetched_bytes,
        link_seconds=times.link(best),
        compute_seconds=times.computed(best),
        seconds=times.seconds(best),
    )


@dataclasses.dataclass(frozen=True)
class _Times:
    """Seconds of the parts of a split: per token, `fetch` b/B, `fetch_input` x/B, `compute` f/F."""

    num_tokens: int
    block_tokens: int
    fetch: float
    fetch_input: float
    compute: float
    overhead: float

    def link(self, tokens: int) -> float:
        return self.fetch_input * tokens + self.fetch * (self.num_tokens - tokens)

    def computed(self, tokens: int) -> float:
        if tokens == 0:
            return 0.0
        first = min(self.block_tokens, tokens)
        last = (tokens - 1) % self.block_tokens + 1
        return self.overhead + max(
            self.fetch_input * first + self.compute * tokens,
            self.fetch_input * tokens + self.compute * last,
        )

    def seconds(self, tokens: int) -> float:
        return max(self.link(tokens), self.computed(tokens))

    def candidates(self) -> set[int]:
        """Return 0, the whole, and the blocks around the crossing of both lines of `computed`."""
        n, block = self.num_tokens, self.block_tokens
        candidates = {0, n}
        if self.fetch_input < self.fetch:
            # c + x T + f r = x r + b (n - r), and c + x r + f T = x r + b (n - r)
            busy = self.fetch * n - self.overhead - self.fetch_input * block
            idle = self.fetch * n - self.overhead - self.compute * block
            crossing = min(busy / (self.compute + self.fetch - self.fetch_input), idle / self.fetch)
            before = math.floor(crossing / block) * block
            candidates |= {min(max(tokens, 0), n) for tokens in (before, before + block)}
        return candidates
