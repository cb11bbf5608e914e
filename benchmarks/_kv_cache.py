"""Decode and prefill on a GPU with a context in tiers, against Transformers' own caches.

    python benchmarks/kv.py --device cuda --part decode        # calls this

A model of few layers of a known shape, in bfloat16 with random weights, has a context of random
keys and values, the same in every arm, of which steps of one token and a call of a chunk of tokens
read all or a sixteenth. An arm of ours keeps a share of the context on the GPU, with the rest in
registered host memory or in a file. Opponents are the cache that is all on the GPU and the one that
Transformers offloads, layer by layer. Arms are measured one after the other, because few contexts
fit at once. Bytes a second of an arm are held against a copy over the link, measured beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import penstock
from _rows import BenchmarkRow, Limit
from penstock.memory import Link, Tier
from penstock.memory.pages import map_anonymous
from penstock.memory.pinned import pin, unpin
from penstock.memory.raw_memory import address_of

TOPIC = "kv"
STOCK, OFFLOADED = "DynamicCache", "OffloadedCache"
CONTEXTS = (32 * 1024, 128 * 1024, 256 * 1024)
CHUNK = 2048  # tokens of the long call, and of those that fill a context
STEPS = 10
LINK_BYTES = 256 << 20
STAGING_BYTES = 16 << 20  # of a budget, beside the resident share
LOGITS_TOLERANCE = 0.05  # of logits near 1: weights and parts are rounded by 2**-9
SHAPES: dict[str, dict[str, Any]] = {
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}


@dataclasses.dataclass(frozen=True)
class CacheArm:
    """A cache: Transformers' by its name, or one of ours.

    Attributes:
        stock: Name of Transformers' cache; "" for ours.
        selector: As of `penstock.kv.cache`.
        share: Resident share of the context.
        below: "host" or "file".
    """

    stock: str = ""
    selector: str = "all"
    share: float = 1.0
    below: str = "host"

    def __str__(self) -> str:
        if self.stock:
            return self.stock
        where = "all resident" if self.share > 1 else f"1/{round(1 / self.share)} resident"
        below = "" if self.share > 1 else f", {self.below} below"
        return f"penstock, {self.selector}, {where}{below}"


ARMS = (
    CacheArm(STOCK),
    CacheArm(OFFLOADED),
    CacheArm(share=1.25),
    CacheArm(share=1 / 4),
    CacheArm(share=1 / 16),
    CacheArm(selector="nosa", share=1 / 4),
    CacheArm(share=1 / 16, below="file"),
    CacheArm(selector="nosa", share=1 / 4, below="file"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheCase:
    """A model's shape and a context."""

    shape: str
    context: int
    num_layers: int

    def __str__(self) -> str:
        return f"{self.shape} shape, {self.num_layers} layers, {self.context} tokens, bfloat16"

    @property
    def cache_bytes(self) -> int:
        """Bytes of the context's keys and values."""
        shape = SHAPES[self.shape]
        width = 2 * shape["num_key_value_heads"] * shape["head_dim"] * 2
        return self.num_layers * self.context * width

    def make_model(self, device: torch.device) -> Any:
        """Return the model, with random weights."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=1024,
            num_hidden_layers=self.num_layers,
            max_position_embeddings=self.context + 2 * CHUNK,
            **SHAPES[self.shape],
        )
        with device:
            return LlamaForCausalLM(config).bfloat16().eval()


def make_cache(arm: CacheArm, case: CacheCase, model: Any, store: str) -> Any:
    """Return an arm's cache, empty."""
    from transformers import DynamicCache

    if arm.stock:
        return DynamicCache(config=model.config, offloading=arm.stock == OFFLOADED)
    return penstock.kv.cache(
        model,
        device_memory=int(case.cache_bytes * arm.share) + STAGING_BYTES,
        selector=arm.selector,
        store=store if arm.below == "file" else None,
    )


def fill(cache: Any, case: CacheCase, device: torch.device) -> None:
    """Fill a cache with random keys and values, the same for every arm."""
    shape = SHAPES[case.shape]
    generator = torch.Generator(device).manual_seed(2)
    make = {"generator": generator, "device": device, "dtype": torch.bfloat16}
    for first in range(0, case.context, CHUNK):
        num_tokens = min(CHUNK, case.context - first)
        size = (2, 1, shape["num_key_value_heads"], num_tokens, shape["head_dim"])
        for layer in range(case.num_layers):
            cache.update(*torch.randn(size, **make), layer)
        for layer in cache.layers:
            if hasattr(layer, "flush"):
                layer.flush()  # after an update attention does it, which is not called here


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_link(device: torch.device) -> float:
    """Return the bytes a second of a copy from registered host memory."""
    mapping = map_anonymous(LINK_BYTES)
    host = torch.frombuffer(mapping, dtype=torch.uint8).fill_(1)
    target = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    is_pinned = device.type == "cuda"
    if is_pinned:
        pin(address_of(mapping), LINK_BYTES, remedy="free memory")
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(host, non_blocking=True)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    if is_pinned:
        unpin(address_of(mapping))
    return LINK_BYTES / statistics.median(seconds)


@dataclasses.dataclass
class Measured:
    """What an arm took.

    Attributes:
        seconds: Of each step of one token.
        chunk_seconds: Of each call of a chunk.
        read_bytes: Of a step.
        chunk_bytes: Read by a call of a chunk.
        logits: Of the first step, on the CPU.
        extra: Further entries of the row.
        peak_bytes: By tier.
    """

    seconds: list[float]
    chunk_seconds: list[float]
    read_bytes: float
    chunk_bytes: float
    logits: torch.Tensor
    extra: dict[str, Any]
    peak_bytes: dict[str, int]


def measure(arm: CacheArm, case: CacheCase, model: Any, store: str) -> Measured:
    """Measure the steps of an arm, and the call of a chunk after them."""
    device = model.device
    cache = make_cache(arm, case, model, store)
    with contextlib.closing(cache) if not arm.stock else contextlib.nullcontext():
        fill(cache, case, device)
        read = (lambda: 0) if arm.stock else (lambda: cache.report().read_bytes)
        token = torch.full((1, 1), 7, device=device)
        logits = model(token, past_key_values=cache).logits.float().cpu()
        for _ in range(2):  # it warms up, and records that are read again find their slots
            model(token, past_key_values=cache)
        seconds, before = [], read()
        for _ in range(STEPS):
            seconds.append(timed(model, token, cache))
        read_bytes = (read() - before) / STEPS
        chunk = torch.full((1, min(CHUNK, case.context)), 9, device=device)
        chunk_seconds, before = [], read()
        for _ in range(2):
            chunk_seconds.append(timed(model, chunk, cache))
        chunk_bytes = (read() - before) / 2
        extra, peak = {}, {}
        if not arm.stock:
            report = cache.report()
            extra = {"hits": report.num_hits, "misses": report.num_misses}
            extra["budget_bytes"] = report.budget_bytes
            ledger = cache.pool.ledger
            peak = {str(tier): ledger.peak(tier) for tier in (Tier.DEVICE, Tier.HOST)}
    return Measured(seconds, chunk_seconds, read_bytes, chunk_bytes, logits, extra, peak)


def timed(model: Any, tokens: torch.Tensor, cache: Any) -> float:
    """Return the seconds of a call."""
    synchronize(model.device)
    start = time.perf_counter()
    model(tokens, past_key_values=cache, logits_to_keep=1)
    synchronize(model.device)
    return time.perf_counter() - start


def cache_rows(
    cases: Sequence[CacheCase], arms: Sequence[CacheArm], device: str, store: str, where: Any
) -> Iterator[BenchmarkRow]:
    """Yield the rows of cases; `where` is from `_rows.environment`.

    Raises:
        AssertionError: An arm that reads all blocks has other logits than `DynamicCache`.
    """
    for case in cases:
        with torch.inference_mode():
            model = case.make_model(torch.device(device))
            link_rate = measure_link(model.device)
            stock: Measured | None = None
            for arm in arms:
                found = measure(arm, case, model, store)
                stock = found if arm.stock == STOCK else stock
                if stock is not None and arm.selector == "all":
                    error = float((found.logits - stock.logits).abs().max())
                    assert error < LOGITS_TOLERANCE, (str(case), str(arm), error)
                yield from rows_of(case, arm, found, stock, link_rate, where)


def rows_of(
    case: CacheCase,
    arm: CacheArm,
    found: Measured,
    stock: Measured | None,
    link_rate: float,
    where: Any,
) -> Iterator[BenchmarkRow]:
    """Yield an arm's row of a step, and of the call of a chunk."""
    link = Limit(name="a copy over the link", value=link_rate, unit="B/s")
    for part, seconds, read, theirs in (
        ("decode", found.seconds, found.read_bytes, stock and stock.seconds),
        ("prefill", found.chunk_seconds, found.chunk_bytes, stock and stock.chunk_seconds),
    ):
        median = statistics.median(seconds)
        extra = {"part": part, "cache_bytes": case.cache_bytes, **found.extra}
        if theirs:
            extra["speed_to_stock"] = statistics.median(theirs) / median
        moved = int(case.cache_bytes if arm.stock == OFFLOADED else read)
        yield BenchmarkRow.of(
            seconds,
            topic=TOPIC,
            case=f"{part}: {case}",
            arm=str(arm),
            moved_bytes={str(Link.HOST_TO_DEVICE): moved} if moved else {},
            peak_bytes=found.peak_bytes,
            limit=link if moved else None,
            measured=moved / median if moved else None,
            extra=extra,
            **where,
        )
