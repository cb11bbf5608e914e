"""One-token attention over resident records of a KV cache, against SDPA on contiguous memory.

    python benchmarks/_kv_kernel.py                            # all cases
    python benchmarks/_kv_kernel.py --dims 128 --keys 4096 --dtypes float32 --threads 1

A call reads one layer; a pass calls several layers in turn, so many that the bytes read between
two calls of a layer exceed LEAST_BYTES and no layer stays in a cache by accident. Arms take turns
in one process, pass by pass, in an order that alternates; ratios are taken within a round. SDPA has
its keys and values as it likes them, `(1, H, N, d)` each, contiguous. Where heads share keys it has
two arms: the heads of a group as rows of the query ("SDPA folded"), and `enable_gqa`. Records lie
in huge pages where the kernel grants them, as a pool's memory may; SDPA's memory is as torch
allocates it (`--small-pages`: the records' too).

`kernel_rows` is what `benchmarks/kv.py` calls.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _rows import BenchmarkRow, Limit, announce, argument_parser, environment, write_rows
from penstock.kv._kernel import attend_records
from penstock.memory.pages import advise_huge_pages

TOPIC = "kv"
OURS, PLAIN, FOLDED, GQA = "penstock", "SDPA", "SDPA folded", "SDPA enable_gqa"
HEADS = ((8, 1), (8, 4), (4, 8))  # KV heads, query heads of each
BLOCK_TOKENS = 64
LEAST_BYTES = 512 << 20  # between two calls of a layer; the shared cache has 260 MiB
LEAST_ROUNDS, MOST_ROUNDS = 7, 25
BARS = {(1, 64): 1.1, (1, 128): 1.5}
GROUPED_BAR = 1.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A layer's shape.

    Attributes:
        dim: Elements of a key and of a value.
        kv_heads: KV heads.
        group: Query heads of each.
        num_keys: Tokens of the context.
        dtype: Of query, keys and values.
        num_threads: torch's.
        huge_pages: Whether records lie in huge pages, where the kernel grants them.
    """

    dim: int
    kv_heads: int
    group: int
    num_keys: int
    dtype: torch.dtype
    num_threads: int
    huge_pages: bool = True

    @property
    def layer_bytes(self) -> int:
        return 2 * self.kv_heads * self.num_keys * self.dim * self.dtype.itemsize

    @property
    def num_layers(self) -> int:
        return max(2, -(-LEAST_BYTES // self.layer_bytes))

    @property
    def arms(self) -> tuple[str, ...]:
        return (OURS, PLAIN) if self.group == 1 else (OURS, FOLDED, GQA)

    @property
    def bar(self) -> float | None:
        """Times that SDPA may take at least, of ours."""
        return GROUPED_BAR if self.group >= 4 else BARS.get((self.group, self.dim))

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        threads = "1 thread" if self.num_threads == 1 else f"{self.num_threads} threads"
        return (
            f"kernel: {self.num_keys} keys, {self.kv_heads}x{self.group} heads of {self.dim}, "
            f"{name}, {threads}" + ("" if self.huge_pages else ", small pages")
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layers:
    """Keys and values of several layers, in records and as SDPA reads them.

    Attributes:
        records: `(layers, H, blocks, T * 2 * d)`.
        keys: `(layers, 1, H, N, d)`.
        values: Like the keys.
    """

    records: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def draw(cls, case: Case) -> Layers:
        """Return layers with the same random values in both forms."""
        shape = (case.num_layers, 1, case.kv_heads, case.num_keys, case.dim)
        keys, values = torch.empty(shape, dtype=case.dtype), torch.empty(shape, dtype=case.dtype)
        keys[0], values[0] = torch.randn(2, *shape[1:]).to(case.dtype)
        num_blocks = case.num_keys // BLOCK_TOKENS
        floats = BLOCK_TOKENS * case.dim
        records = torch.empty(
            case.num_layers, case.kv_heads, num_blocks, 2, floats, dtype=case.dtype
        )
        if case.huge_pages:
            advise_huge_pages(records.data_ptr(), records.nbytes)
        for layer in range(case.num_layers):
            keys[layer], values[layer] = keys[0], values[0]
            for half, of in enumerate((keys, values)):
                records[layer, :, :, half] = of[layer, 0].view(case.kv_heads, num_blocks, floats)
        return cls(records=records.flatten(3), keys=keys, values=values)

    def addresses(self, layer: int) -> torch.Tensor:
        """Return the records' addresses of a layer, `(1, H, blocks)`."""
        first = self.records[layer]
        number = torch.arange(first[..., 0].numel()).view(1, *first.shape[:2])
        return first.data_ptr() + number * first.stride(1) * first.itemsize


def make_calls(case: Case, layers: Layers) -> dict[str, Callable[[int], torch.Tensor]]:
    """Return by arm the attention of one token over a layer, `(1, Hq, 1, d)`."""
    torch.manual_seed(1)
    heads = case.kv_heads * case.group
    query = torch.randn(1, heads, 1, case.dim).to(case.dtype)
    counts = torch.full((1, *layers.records.shape[1:3]), BLOCK_TOKENS, dtype=torch.int32)
    addresses = [layers.addresses(layer) for layer in range(case.num_layers)]
    folded = query.view(1, case.kv_heads, case.group, case.dim)

    def ours(layer: int) -> torch.Tensor:
        where = {"block_tokens": BLOCK_TOKENS, "value_dim": case.dim, "scale": case.dim**-0.5}
        return attend_records(query, addresses[layer], counts, **where)[0]

    def plain(layer: int, **options: Any) -> torch.Tensor:
        keys, values = layers.keys[layer], layers.values[layer]
        return scaled_dot_product_attention(query, keys, values, **options)

    def fold(layer: int) -> torch.Tensor:
        out = scaled_dot_product_attention(folded, layers.keys[layer], layers.values[layer])
        return out.view(query.shape)

    gqa = functools.partial(plain, enable_gqa=True)
    return {OURS: ours, PLAIN: plain, FOLDED: fold, GQA: gqa}


def timed(call: Callable[[int], torch.Tensor], num_layers: int) -> float:
    """Return the seconds of a call, averaged over a pass."""
    start = time.perf_counter()
    for layer in range(num_layers):
        call(layer)
    return (time.perf_counter() - start) / num_layers


def measure(case: Case, layers: Layers, budget_seconds: float) -> dict[str, list[float]]:
    """Return the seconds of a call by arm, round by round; an arm too slow for them is left out."""
    torch.set_num_threads(case.num_threads)
    calls = {name: make_calls(case, layers)[name] for name in case.arms}
    with torch.no_grad():
        expected = calls[OURS](0)
        for name, call in calls.items():
            # Random values of some thousand keys: sums of 1/60; bfloat16 rounds them by 2**-9.
            error = (call(0).float() - expected).abs().max()
            assert error < (1e-5 if case.dtype == torch.float32 else 2e-3), (str(case), name, error)
        rough = {name: case.num_layers * timed(call, 1) for name, call in calls.items()}
        if GQA in calls and LEAST_ROUNDS * rough[GQA] > budget_seconds:
            del calls[GQA], rough[GQA]
        num_rounds = int(budget_seconds / sum(rough.values()))
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(max(LEAST_ROUNDS, min(MOST_ROUNDS, num_rounds))):
            for name in list(calls) if number % 2 == 0 else list(reversed(calls)):
                seconds[name].append(timed(calls[name], case.num_layers))
    return seconds


def rows_of(case: Case, seconds: dict[str, list[float]], where: Any) -> list[BenchmarkRow]:
    """Return a row an arm; ours is held against its bar, in times that SDPA takes of it."""
    rows = []
    opponent = PLAIN if case.group == 1 else FOLDED
    for name, times in seconds.items():
        speedups = [theirs / ours for theirs, ours in zip(seconds[opponent], times, strict=True)]
        lower, median, upper = statistics.quantiles(speedups, n=4, method="inclusive")
        extra = {
            "part": "kernel",
            "layers": case.num_layers,
            "speedup": median,
            "speedup_quartiles": [lower, upper],
            "speedup_to": opponent,
            "bytes_per_second": case.layer_bytes / statistics.median(times),
            "not_run": [arm for arm in case.arms if arm not in seconds],
        }
        limit = None
        if name == OURS and case.bar is not None:
            limit = Limit(name=f"{case.bar} x {opponent}", value=case.bar, unit="1")
        rows.append(
            BenchmarkRow.of(
                times,
                topic=TOPIC,
                case=str(case),
                arm=name,
                moved_bytes={"device": case.layer_bytes},
                limit=limit,
                measured=None if limit is None else median,
                extra=extra,
                **where,
            )
        )
    return rows


def make_cases(options: argparse.Namespace) -> list[Case]:
    """Return the cases of a command line, those with the same keys one after the other."""
    return [
        Case(
            dim=dim,
            kv_heads=kv_heads,
            group=group,
            num_keys=num_keys,
            dtype=getattr(torch, dtype),
            num_threads=num_threads,
            huge_pages=not options.small_pages,
        )
        for dtype in options.dtypes
        for dim in options.dims
        for num_keys in options.keys
        for kv_heads, group in HEADS
        if not options.heads or f"{kv_heads}x{group}" in options.heads
        for num_threads in options.threads
    ]


def kernel_rows(cases: Sequence[Case], budget_seconds: float, where: Any) -> Iterator[BenchmarkRow]:
    """Yield the rows of cases; consecutive ones of one shape share their memory.

    Args:
        cases: The cases.
        budget_seconds: Roughly the time of a case.
        where: From `_rows.environment`.
    """
    shape, layers = None, None
    before = torch.get_num_threads()
    try:
        for case in cases:
            wanted = (case.dim, case.kv_heads, case.num_keys, case.dtype)
            if layers is None or wanted != shape:
                layers = None  # before the next ones are drawn
                shape, layers = wanted, Layers.draw(case)
            yield from rows_of(case, measure(case, layers, budget_seconds), where)
    finally:
        torch.set_num_threads(before)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose cases."""
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--heads", nargs="+", metavar="KVxGROUP", help="8x1, 8x4, 4x8")
    parser.add_argument("--keys", nargs="+", type=int, default=[4096, 16384, 65536])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--small-pages", action="store_true", help="for records too")
    parser.add_argument("--budget-seconds", type=float, default=2.0, help="of a case, roughly")


def main() -> None:
    parser = argument_parser(__doc__)
    add_options(parser)
    options = parser.parse_args()
    cases = make_cases(options)
    if options.dry_run:
        announce((str(case), arm) for case in cases for arm in case.arms)
        return
    for row in kernel_rows(cases, options.budget_seconds, environment()):
        speedup = row.extra["speedup"], *row.extra["speedup_quartiles"]
        print(row, "speedup {:.2f} ({:.2f} to {:.2f})".format(*speedup), flush=True)
        write_rows([row], options.out)


if __name__ == "__main__":
    main()
