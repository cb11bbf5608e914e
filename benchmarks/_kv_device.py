"""One-token attention on a GPU over a long context's records, in its memory or in the host's.

    python benchmarks/kv.py --device cuda --part kernel        # calls this

A call reads one layer of a model's keys and values; a pass calls several layers in turn, so that
none stays in the GPU's cache. Arms take turns, pass by pass. Records lie in the GPU's memory, or in
host memory that is registered, where the kernel reads them itself ("direct"); of these, one arm
reads a sixteenth, chosen at random, as a selector would. Opponents are SDPA over contiguous keys in
the GPU's memory, with the heads of a group as rows, and the same after a copy of the layer from
registered memory, which is the least that an offloaded cache does. Rates are held against those of
copies, measured beside them: within the GPU's memory (reads and writes), and over the link.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from _rows import BenchmarkRow, Limit
from penstock.memory.pages import map_anonymous, round_up
from penstock.memory.pinned import pin, unpin
from penstock.memory.raw_memory import address_of

TOPIC = "kv"
RESIDENT, DIRECT, SELECTED = "penstock, on the GPU", "penstock, direct", "penstock, direct, 1/16"
STOCK, COPIED = "SDPA folded, on the GPU", "copy, then SDPA folded"
ARMS = (RESIDENT, DIRECT, SELECTED, STOCK, COPIED)
SHARE = 16  # of the blocks, one is selected
CONTEXTS = (32 * 1024, 128 * 1024, 256 * 1024)
SHAPES = {"1B": (8, 4, 64), "8B": (8, 4, 128)}  # KV heads, query heads of each, dim
BLOCK_TOKENS = 64
LEAST_BYTES = 512 << 20  # between two calls of a layer
ROUNDS = 7
TOLERANCE = 2e-3  # of averages of values near 1, rounded by 2**-9


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceCase:
    """Layers of a model's shape in bfloat16.

    Attributes:
        shape: A key of `SHAPES`.
        num_keys: Tokens of the context, a multiple of `BLOCK_TOKENS * SHARE`.
        least_bytes: Of all layers.
    """

    shape: str
    num_keys: int
    least_bytes: int = LEAST_BYTES

    @property
    def record_bytes(self) -> int:
        return 2 * BLOCK_TOKENS * SHAPES[self.shape][2] * 2

    @property
    def layer_bytes(self) -> int:
        return SHAPES[self.shape][0] * self.num_keys // BLOCK_TOKENS * self.record_bytes

    @property
    def num_layers(self) -> int:
        return max(1, -(-self.least_bytes // self.layer_bytes))

    def __str__(self) -> str:
        kv_heads, group, dim = SHAPES[self.shape]
        return f"kernel: {self.num_keys} keys, {kv_heads}x{group} heads of {dim}, bfloat16"


class DeviceLayers:
    """Records of equal layers on a device and in host memory, registered where there is a GPU.

    Attributes:
        records: On the device, `(layers, H, blocks, 2, T, dim)`.
        host: The same in host memory.
    """

    def __init__(self, case: DeviceCase, device: torch.device) -> None:
        kv_heads, _, dim = SHAPES[case.shape]
        shape = (kv_heads, case.num_keys // BLOCK_TOKENS, 2, BLOCK_TOKENS, dim)
        layer = torch.randn(shape, device=device).bfloat16()
        self.records = layer.repeat(case.num_layers, 1, 1, 1, 1, 1)
        self._mapping = map_anonymous(round_up(self.records.nbytes))
        self._address = address_of(self._mapping)
        self._is_pinned = device.type == "cuda"
        if self._is_pinned:
            pin(self._address, len(self._mapping), remedy="choose fewer --contexts")
        flat = torch.frombuffer(self._mapping, dtype=torch.bfloat16)
        self.host = flat[: self.records.numel()].view(self.records.shape)
        self.host.copy_(self.records)

    def close(self) -> None:
        """End the registration, after the last call has ended."""
        if self._is_pinned:
            torch.cuda.synchronize()
            unpin(self._address)

    def addresses(self, records: torch.Tensor, layer: int) -> torch.Tensor:
        """Return the addresses of a layer's records, `(1, H, blocks)`, on the device."""
        of_layer = records[layer]
        number = torch.arange(of_layer[:, :, 0, 0, 0].numel()).view(1, *of_layer.shape[:2])
        addresses = of_layer.data_ptr() + number * of_layer[0, 0].nbytes
        return addresses.to(self.records.device)


def make_calls(case: DeviceCase, layers: DeviceLayers) -> dict[str, Callable[[int], torch.Tensor]]:
    """Return by arm the attention of one token over a layer, `(1, Hq, 1, dim)`."""
    kv_heads, group, dim = SHAPES[case.shape]
    device = layers.records.device
    query = torch.randn(1, kv_heads * group, 1, dim, device=device).bfloat16()
    folded = query.view(1, kv_heads, group, dim)
    num_blocks = case.num_keys // BLOCK_TOKENS
    chosen = torch.randperm(num_blocks)[: num_blocks // SHARE].sort().values.to(device)
    resident, direct = (
        [layers.addresses(records, layer) for layer in range(case.num_layers)]
        for records in (layers.records, layers.host)
    )
    selected = [each[:, :, chosen].contiguous() for each in direct]
    # Keys and values as SDPA likes them, `(2, layers, 1, H, tokens, dim)`, there and here.
    halves = layers.records.movedim(3, 0).unsqueeze(2).flatten(4, 5).contiguous()
    landing = torch.empty_like(halves[:, 0])
    flat = landing.view(-1)

    def ours(tables: list[torch.Tensor]) -> Callable[[int], torch.Tensor]:
        counts = torch.full_like(tables[0], BLOCK_TOKENS, dtype=torch.int32)
        where: dict[str, Any] = {"block_tokens": BLOCK_TOKENS, "value_dim": dim}
        if device.type == "cuda":
            from penstock.kv.triton import attend_records

            where["is_aligned"] = True
        else:
            from penstock.kv._kernel import attend_records
        return lambda layer: attend_records(query, tables[layer], counts, scale=dim**-0.5, **where)[
            0
        ]

    def attend_folded(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(folded, keys, values).view(query.shape)

    def stock(layer: int) -> torch.Tensor:
        return attend_folded(halves[0, layer], halves[1, layer])

    def copied(layer: int) -> torch.Tensor:
        flat.copy_(layers.host[layer].view(-1), non_blocking=True)  # in any order: bytes count
        return attend_folded(landing[0], landing[1])

    return dict(zip(ARMS, [*map(ours, (resident, direct, selected)), stock, copied], strict=True))


def timed(call: Callable[[int], object], num_layers: int, device: torch.device) -> float:
    """Return the seconds of a call, averaged over a pass."""
    start = time.perf_counter()
    for layer in range(num_layers):
        call(layer)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / num_layers


def measure(case: DeviceCase, device: torch.device) -> tuple[dict[str, list[float]], list[float]]:
    """Return the seconds of a call by arm, and the rates of copies on the device and over the link.

    Raises:
        AssertionError: An arm has another result than SDPA.
    """
    torch.manual_seed(0)
    layers = DeviceLayers(case, device)
    try:
        calls = make_calls(case, layers)
        expected = calls[STOCK](0).float()
        for name in (RESIDENT, DIRECT):
            error = float((calls[name](0).float() - expected).abs().max())
            assert error < TOLERANCE, (str(case), name, error)
        target = torch.empty_like(layers.records[0])
        copies: list[Callable[[int], object]] = [
            lambda layer: target.copy_(layers.records[layer]),
            lambda layer: target.copy_(layers.host[layer], non_blocking=True),
        ]
        arms = [*calls.values(), *copies]
        found: list[list[float]] = [[] for _ in arms]
        for number in range(1 + ROUNDS):  # the first warms up
            for arm, seconds in zip(arms, found, strict=True):
                seconds += [timed(arm, case.num_layers, device)] if number else []
                if not number:
                    timed(arm, case.num_layers, device)
        on_device, link = (case.layer_bytes / statistics.median(each) for each in found[-2:])
        return dict(zip(calls, found, strict=False)), [2 * on_device, link]
    finally:
        layers.close()


def device_rows(cases: Sequence[DeviceCase], device: str, where: Any) -> Iterator[BenchmarkRow]:
    """Yield the rows of cases; `where` is from `_rows.environment`."""
    for case in cases:
        seconds, (memory_rate, link_rate) = measure(case, torch.device(device))
        for name, times in seconds.items():
            moved = case.layer_bytes // (SHARE if name == SELECTED else 1)
            is_resident = name in (RESIDENT, STOCK)
            limit = Limit(
                name="a copy on the device" if is_resident else "a copy over the link",
                value=memory_rate if is_resident else link_rate,
                unit="B/s",
            )
            rate = moved / statistics.median(times)
            pairs = zip(seconds[STOCK if is_resident else COPIED], times, strict=True)
            extra = {
                "part": "kernel",
                "layers": case.num_layers,
                "bytes_per_second": rate,
                "speedup": statistics.median(theirs / ours for theirs, ours in pairs),
                "speedup_to": STOCK if is_resident else COPIED,
            }
            yield BenchmarkRow.of(
                times,
                topic=TOPIC,
                case=str(case),
                arm=name,
                moved_bytes={"device" if is_resident else "host->device": moved},
                limit=limit,
                measured=rate,
                extra=extra,
                **where,
            )
