"""Contexts longer than memory: `penstock.kv` against Transformers' own cache.

    python benchmarks/kv.py                          # all parts
    python benchmarks/kv.py --quick                  # one context
    python benchmarks/kv.py --part kernel            # the one-token kernel, by `_kv_kernel.py`
    python benchmarks/kv.py --part decode --contexts 16384 --store /mnt/nvme
    python benchmarks/kv.py --device cuda                 # on a GPU: the Triton kernel, by
                                                          # `_kv_device.py`, and `_kv_cache.py`

Part `decode` fills each arm's cache with the same tokens, in chunks, and then times steps of one
token; the arms take turns in one process. A turn is a few steps, of which the first is not timed:
it finds the processor's caches full of another arm's bytes, where a user's step follows one of its
own. An arm of ours keeps a share of the cache's bytes on the device: all of them, a quarter or a
sixteenth, with the rest in host memory or in a file. Rows have the bytes read a step, the misses
times a record, and the ledger's peak. After each turn of the arm that reads all blocks from the
file, threads read as many bytes as its step from a file beside it, by direct I/O into huge pages
and with nothing else to do: its bandwidth is held against theirs. `model_seconds` is a step of the
model with next to no context, below which no cache can get. The calls that fill a cache are rows of
their own, of one repetition each (`prefill`), for contexts up to 8192 tokens; longer ones are
filled with random keys and values.
Transformers' offloaded cache needs a GPU, and its quantised ones packages of their own: no arms.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import _kv_cache
import _kv_device
import _kv_kernel
import penstock
from _rows import BenchmarkRow, Limit, announce, argument_parser, environment, write_rows
from penstock.memory import ExtentFile, Link, Tier
from penstock.memory.pages import HUGE_PAGE_BYTES, advise_huge_pages, round_up

TOPIC = "kv"
PARTS = ("decode", "kernel")
STOCK = "DynamicCache"
ALONE = "DynamicCache, 16 tokens"  # the model's own time; no rows
STEPS_OF_TURN = 3  # that are timed
CHUNK = 1024  # tokens of a call while a cache is filled
MOST_COMPUTED = 8192  # tokens of a context that the model computes; longer ones are drawn
FITS_BAR = 0.9  # of DynamicCache's tokens a second, where everything fits
SPARSE_BAR = 5.0  # times the tokens a second of "all" from the file
FILE_BAR = 0.8  # of the file's bandwidth
READ_BYTES, READ_THREADS = 1 << 20, 4  # reads that measure it: none were faster
FILE_BYTES = 256 << 20  # the most of the file that is read for that


@dataclasses.dataclass(frozen=True)
class Arm:
    """A cache of ours.

    Attributes:
        selector: As of `penstock.kv.cache`.
        share: Resident share of the cache's bytes.
        below: "host" or "file".
    """

    selector: str
    share: float
    below: str

    def __str__(self) -> str:
        where = "all resident" if self.share >= 1 else f"1/{round(1 / self.share)} resident"
        return f"penstock, {self.selector}, {where}" + (
            "" if self.share >= 1 else f", {self.below} below"
        )


ARMS = (
    Arm("all", 2.0, "host"),
    Arm("window", 2.0, "host"),
    Arm("nosa", 2.0, "host"),
    Arm("accumulated", 2.0, "host"),
    Arm("all", 1 / 4, "host"),
    Arm("all", 1 / 16, "host"),
    Arm("all", 1 / 4, "file"),
    Arm("all", 1 / 16, "file"),
    Arm("window", 1 / 16, "file"),
    Arm("nosa", 1 / 16, "file"),
    Arm("accumulated", 1 / 16, "file"),
)
FROM_FILE = str(Arm("all", 1 / 16, "file"))
SHAPES: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 64},
    "Gemma 3": {"num_key_value_heads": 2, "head_dim": 64, "sliding_window": 512},
    "Llama, 8 KV heads": {"num_key_value_heads": 8, "head_dim": 128},  # only where it is named
}


def make_model(name: str, options: argparse.Namespace) -> Any:
    """Return a seeded model of few layers."""
    import transformers

    config_type, model_type = {
        "Llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "Qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "Gemma 3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    }[name.partition(",")[0]]
    torch.manual_seed(0)
    shape = dict(SHAPES[name])
    if "sliding_window" in shape:  # two layers of Gemma 3 would both have one
        kinds = itertools.cycle(["sliding_attention", "full_attention"])
        shape["layer_types"] = list(itertools.islice(kinds, options.layers))
    config = config_type(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        max_position_embeddings=max(options.contexts) + 4096,
        **shape,
    )
    return model_type(config).eval()


def cache_bytes(model: Any, context: int) -> int:
    """Return the bytes of keys and values of a context in all layers without a window."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // 8
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    lengths = [min(context, window) if "sliding" in kind and window else context for kind in kinds]
    return sum(lengths) * 2 * config.num_key_value_heads * head_dim * 4


class Decoder:
    """An arm: a cache with a context, and steps of one token."""

    def __init__(self, model: Any, cache: Any, tokens: torch.Tensor) -> None:
        self._model, self.cache = model, cache
        self.context = tokens.shape[1]
        start = time.perf_counter()
        self.is_computed = self.context <= MOST_COMPUTED
        if self.is_computed:
            *parts, last = tokens.split(CHUNK, dim=1)
            for part in parts:
                model(part, past_key_values=cache, logits_to_keep=1)
            logits = model(last, past_key_values=cache, logits_to_keep=1).logits
            self._next = logits[:, -1].argmax(-1, keepdim=True)
        else:
            self._draw_context()
            self._next = tokens[:, -1:]
        self.prefill_seconds = time.perf_counter() - start
        self.seconds: list[float] = []  # of the steps that are timed
        self.num_steps = 0  # since `forget`
        self.tokens: list[int] = []

    def _draw_context(self) -> None:
        """Fill the cache with random keys and values, the same for every arm."""
        config = self._model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // 8
        generator = torch.Generator().manual_seed(2)
        for first in range(0, self.context, CHUNK):
            shape = (1, config.num_key_value_heads, min(CHUNK, self.context - first), head_dim)
            for layer in range(config.num_hidden_layers):
                self.cache.update(*torch.randn(2, *shape, generator=generator), layer)
            for layer in self.cache.layers:
                if hasattr(layer, "flush"):
                    layer.flush()  # after an update attention does it, which is not called here

    def take_turn(self) -> None:
        """Decode some tokens; the first one is not timed."""
        self.step()
        for _ in range(STEPS_OF_TURN):
            start = time.perf_counter()
            self.step()
            self.seconds.append(time.perf_counter() - start)

    def step(self) -> None:
        """Decode one token."""
        out = self._model(self._next, past_key_values=self.cache)
        self._next = out.logits[:, -1].argmax(-1, keepdim=True)
        self.tokens.append(int(self._next))
        self.num_steps += 1

    def forget(self) -> None:
        """Begin to count anew."""
        self.seconds.clear()
        self.num_steps = 0


class FileReads:
    """Reads of a file in a store, by threads that do nothing else."""

    def __init__(self, store: str, num_bytes: int) -> None:
        self._file = ExtentFile(store)
        self._num_extents = max(1, min(num_bytes, FILE_BYTES) // READ_BYTES)
        memory = torch.empty(READ_THREADS * READ_BYTES + HUGE_PAGE_BYTES, dtype=torch.uint8)
        advise_huge_pages(memory.data_ptr(), memory.nbytes)
        self._memory = memory.random_(256)
        start = round_up(memory.data_ptr(), HUGE_PAGE_BYTES)
        self._addresses = [start + i * READ_BYTES for i in range(READ_THREADS)]
        self._extents = [self._file.allocate(READ_BYTES) for _ in range(self._num_extents)]
        for extent in self._extents:
            self._file.write(extent, start, READ_BYTES)
        self._threads = ThreadPoolExecutor(READ_THREADS)

    def _read_share(self, thread: int, num_reads: int) -> None:
        for number in range(thread, num_reads, READ_THREADS):
            extent = self._extents[number % self._num_extents]
            self._file.read(extent, self._addresses[thread], READ_BYTES)

    def measure(self, num_bytes: int) -> float:
        """Return the bytes per second of reading that many, rounded to whole reads."""
        num_reads = max(READ_THREADS, num_bytes // READ_BYTES)
        start = time.perf_counter()
        shares = [
            self._threads.submit(self._read_share, thread, num_reads)
            for thread in range(READ_THREADS)
        ]
        for share in shares:
            share.result()
        return num_reads * READ_BYTES / (time.perf_counter() - start)

    def close(self) -> None:
        """End the threads and give the file back."""
        self._threads.shutdown()
        self._file.close()


def decode_rows(
    name: str, context: int, options: argparse.Namespace, where: Any
) -> Iterator[BenchmarkRow]:
    """Yield the rows of a model at one length of context."""
    from transformers import DynamicCache

    model = make_model(name, options)
    tokens = torch.randint(3, 1024, (1, context), generator=torch.Generator().manual_seed(1))
    total = cache_bytes(model, context)
    window = ", every other one with a window" if "sliding_window" in SHAPES[name] else ""
    case = f"{name} of {options.layers} layers{window}, {context} tokens"
    with contextlib.ExitStack() as stack, torch.no_grad():
        decoders = {
            STOCK: Decoder(model, DynamicCache(config=model.config), tokens),
            ALONE: Decoder(model, DynamicCache(config=model.config), tokens[:, :16]),
        }
        counts: dict[str, tuple[int, int, int]] = {}
        for arm in options.arms:
            budget = int(total * arm.share) + (1 << 20)
            below = {"store": options.store} if arm.below == "file" else {}
            cache = penstock.kv.cache(model, device_memory=budget, selector=arm.selector, **below)
            stack.callback(cache.close)
            decoders[str(arm)] = Decoder(model, cache, tokens)
        file_reads = FileReads(options.store, total)
        stack.callback(file_reads.close)
        bandwidths: list[float] = []
        for number in range(1 + -(-options.steps // STEPS_OF_TURN)):
            if number == 1:  # the first turn warms up
                for key, each in decoders.items():
                    each.forget()
                    counts[key] = read_counts(each.cache)
                bandwidths.clear()
            for key, each in decoders.items():
                read = read_counts(each.cache)[2]
                each.take_turn()
                if key == FROM_FILE:
                    read = (read_counts(each.cache)[2] - read) // (1 + STEPS_OF_TURN)
                    bandwidths += [file_reads.measure(read)] * STEPS_OF_TURN
        for arm in (None, *options.arms):
            key = STOCK if arm is None else str(arm)
            if decoders[key].is_computed:
                yield prefill_row(case, key, decoders[key], where)
            speeds = bandwidths if key == FROM_FILE else []
            yield row_of(case, key, arm, decoders, counts[key], total, speeds, where)


def prefill_row(case: str, key: str, decoder: Decoder, where: Any) -> BenchmarkRow:
    """Return the row of filling a cache."""
    pooled = hasattr(decoder.cache, "pool")
    peak = {str(Tier.DEVICE): decoder.cache.pool.ledger.peak(Tier.DEVICE)} if pooled else {}
    return BenchmarkRow.of(
        [decoder.prefill_seconds],
        topic=TOPIC,
        case=f"prefill: {case}",
        arm=key,
        peak_bytes=peak,
        extra={"part": "prefill", "tokens_per_second": decoder.context / decoder.prefill_seconds},
        **where,
    )


def read_counts(cache: Any) -> tuple[int, int, int]:
    """Return hits, misses and bytes read of a cache of ours; zeros of another one."""
    if not hasattr(cache, "pool"):
        return 0, 0, 0
    report = cache.report()
    return report.num_hits, report.num_misses, report.read_bytes


def row_of(
    case: str,
    key: str,
    arm: Arm | None,
    decoders: dict[str, Decoder],
    before: tuple[int, int, int],
    total: int,
    bandwidths: list[float],
    where: Any,
) -> BenchmarkRow:
    decoder, stock = decoders[key], decoders[STOCK]
    steps = decoder.num_steps
    hits, misses, read = (b - a for a, b in zip(before, read_counts(decoder.cache), strict=True))
    speed = statistics.median(
        theirs / ours for theirs, ours in zip(stock.seconds, decoder.seconds, strict=True)
    )
    extra: dict[str, Any] = {
        "part": "decode",
        "tokens_per_second": 1 / statistics.median(decoder.seconds),
        "prefill_seconds": decoder.prefill_seconds,
        "speed_to_stock": speed,
        "cache_bytes": total,
        "model_seconds": statistics.median(decoders[ALONE].seconds),
        "equal_tokens": decoder.tokens == stock.tokens,
    }
    limit = measured = None
    peak: dict[str, int] = {}
    if arm is not None:
        pool = decoder.cache.pool
        layout = pool.layout(pool.layers()[0])
        extra |= {
            "hits_per_step": hits / steps,
            "misses_per_step": misses / steps,
            "record_bytes": layout.record_bytes,
            "bytes_per_second": read / steps / statistics.mean(decoder.seconds),
            "budget_bytes": decoder.cache.report().budget_bytes,
            "unused_bytes": decoder.cache.report().unused_bytes,
            "hit_rate": hits / max(1, hits + misses),
        }
        peak = {str(Tier.DEVICE): pool.ledger.peak(Tier.DEVICE)}
        from_file = decoders.get(FROM_FILE)
        if arm.share >= 1:
            limit, measured = Limit(name=f"{FITS_BAR} x {STOCK}", value=FITS_BAR, unit="1"), speed
        elif arm.selector != "all" and from_file is not None:
            measured = statistics.median(
                slow / fast for slow, fast in zip(from_file.seconds, decoder.seconds, strict=True)
            )
            limit = Limit(name=f"{SPARSE_BAR} x all from the file", value=SPARSE_BAR, unit="1")
        elif key == FROM_FILE and bandwidths:
            # Of each step and the reads after its turn: the bandwidth of a disk changes with time.
            shares = [
                read / steps / seconds / bandwidth
                for seconds, bandwidth in zip(decoder.seconds, bandwidths, strict=True)
            ]
            extra |= {"file_bytes_per_second": statistics.median(bandwidths), "shares": shares}
            measured = statistics.median(shares)
            limit = Limit(name=f"{FILE_BAR} x the file's bandwidth", value=FILE_BAR, unit="1")
    link = Link.FILE_TO_DEVICE if arm is not None and arm.below == "file" else Link.HOST_TO_DEVICE
    return BenchmarkRow.of(
        decoder.seconds,
        topic=TOPIC,
        case=f"decode: {case}",
        arm=key,
        moved_bytes={str(link): read // steps} if arm is not None else {},
        peak_bytes=peak,
        limit=limit,
        measured=measured,
        extra=extra,
        **where,
    )


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="one context, one model")
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES)[:3])
    parser.add_argument("--contexts", nargs="+", type=int, default=[2048, 8192, 32768, 65536])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--store", help="directory of the file tier (default: a temporary one)")
    _kv_kernel.add_options(parser)
    options = parser.parse_args()
    options.arms = ARMS
    if options.quick:
        options.models, options.contexts = ["Llama"], [8192]
    return options


def run_device(options: argparse.Namespace) -> None:
    """Measure the kernel and caches on a GPU."""
    kernels = [
        _kv_device.DeviceCase(shape=shape, num_keys=num_keys)
        for shape in _kv_device.SHAPES
        for num_keys in (_kv_device.CONTEXTS[:1] if options.quick else _kv_device.CONTEXTS)
    ]
    caches = [
        _kv_cache.CacheCase(shape=shape, context=context, num_layers=options.layers)
        for shape in (["8B"] if options.quick else _kv_cache.SHAPES)
        for context in (_kv_cache.CONTEXTS[:1] if options.quick else _kv_cache.CONTEXTS)
    ]
    kernels = kernels if "kernel" in options.part else []
    caches = caches if "decode" in options.part else []
    if options.dry_run:
        announce((str(case), arm) for case in kernels for arm in _kv_device.ARMS)
        announce(
            (f"{part}: {case}", str(arm))
            for case in caches
            for arm in _kv_cache.ARMS
            for part in ("decode", "prefill")
        )
        return
    where = environment(options.device)
    with tempfile.TemporaryDirectory() as directory:
        store = options.store or directory
        for row in itertools.chain(
            _kv_device.device_rows(kernels, options.device, where),
            _kv_cache.cache_rows(caches, _kv_cache.ARMS, options.device, store, where),
        ):
            print(row, file=sys.stderr, flush=True)
            write_rows([row], options.out)


def main() -> None:
    options = arguments()
    if options.device != "cpu":
        run_device(options)
        return
    cases = [(name, context) for name in options.models for context in options.contexts]
    kernels = _kv_kernel.make_cases(options)
    if options.dry_run:
        arms = [STOCK, *map(str, options.arms)]
        named = [
            f"{part}: {name}, {context} tokens"
            for name, context in cases
            for part in ("prefill", "decode")
        ]
        if "decode" in options.part:
            announce((case, arm) for case in named for arm in arms)
        if "kernel" in options.part:
            announce((str(case), arm) for case in kernels for arm in case.arms)
        return
    where = environment(options.device)

    def write(rows: Iterator[BenchmarkRow]) -> None:
        for row in rows:
            print(row, file=sys.stderr, flush=True)
            write_rows([row], options.out)

    with tempfile.TemporaryDirectory() as directory:
        options.store = options.store or directory
        for name, context in cases if "decode" in options.part else ():
            write(decode_rows(name, context, options, where))
    if "kernel" in options.part:
        write(_kv_kernel.kernel_rows(kernels, options.budget_seconds, where))


if __name__ == "__main__":
    main()
