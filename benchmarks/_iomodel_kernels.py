"""Counted bytes of the kernels of each package beside their closed forms; a JSON line a launch.

`iomodel.py` starts it in a process of its own, since Triton's interpreter has to be chosen before
Triton is imported.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.runtime import interpreter

from penstock import rgnn
from penstock.codegen import ByteCount, count_bytes


def report(case: str, kernel: str, call: Callable[[], object], model: ByteCount) -> None:
    """Count a call and write its line."""
    start = time.perf_counter()
    counted = count_bytes(call)
    line = {
        "case": case,
        "kernel": kernel,
        "seconds": time.perf_counter() - start,
        "counted": as_moved(counted),
        "model": as_moved(model),
    }
    print(json.dumps(line), flush=True)


def as_moved(count: ByteCount) -> dict[str, int]:
    """Bytes by kind."""
    return {
        "loaded": count.loaded_bytes,
        "stored": count.stored_bytes,
        "atomic": count.atomic_bytes,
    }


def count_unified() -> None:
    """Rows that are gathered, put and added."""
    from kernel_bytes.rows import added_bytes, copied_bytes
    from penstock.unified.device import _rows

    for width in (16, 33, 100, 600):
        table, out = torch.randn(200, width), torch.empty(64, width)
        index = torch.randint(0, 200, (64,))
        call = (table, index, out, None)
        report(f"unified, rows of {4 * width} B", "copy_rows",
               lambda: _rows.copy_rows(*call, None, False, True, 0), copied_bytes(*call))  # noqa: B023  # fmt: skip
        rows, order = torch.sort(index, stable=True)
        added = (table, rows, order, torch.randn(64, width))
        report(f"unified, rows of {4 * width} B", "add_runs",
               lambda: _rows.add_sorted_rows(*added), added_bytes(*added))  # noqa: B023  # fmt: skip


def count_lora() -> None:
    """A layer with two adapters, forward and backward."""
    from kernel_bytes.adapters import LayerBytes
    from penstock.lora.triton import LayerAdapters, Part, choose_tiles, cut_rows, forward

    ranks, rows, inner, width = (8, 16), 150, 96, 80
    tables = cut_rows(rows, [Part(0, 0, 70, 0), Part(1, 70, 140, 0)], ranks,
                      choose_tiles(torch.float32, torch.float32, ranks),
                      device=torch.device("cpu"))  # fmt: skip
    adapters = LayerAdapters(
        downs=tuple(torch.randn(rank, inner) for rank in ranks),
        ups=tuple(torch.randn(width, rank) for rank in ranks),
        scalings=(1.0, 2.0), dropouts=(0.0, 0.0), seeds=(0, 0),
    )  # fmt: skip
    of = LayerBytes(rows=tables, in_features=inner, out_features=width, element=4,
                    adapter_element=4, has_dropout=False)  # fmt: skip
    launches: list[Any] = []
    forward(torch.randn(rows, inner), torch.randn(width, inner), None, adapters, tables,
            run=launches.append)  # fmt: skip
    for launch, model in zip(launches, (of.down_product(), of.base_product()), strict=True):
        report("lora, two adapters", launch.kernel.__name__, launch, model)


def count_kv() -> None:
    """Decoding of records, of one query head and of four for each key."""
    from kernel_bytes.records import requested_bytes
    from penstock.kv.triton._launch import RecordCall, attend, choose_tiles

    tokens, dim, num_records = 64, 32, 12
    for group in (1, 4):
        records = torch.randn(num_records, tokens * 2 * dim)
        addresses = records.data_ptr() + torch.arange(num_records) * records.stride(0) * 4
        call = RecordCall(
            query=torch.randn(1, group, 1, dim),
            addresses=addresses.view(1, 1, -1),
            counts=torch.full((1, 1, num_records), tokens, dtype=torch.int32),
            block_tokens=tokens, value_dim=dim, scale=dim**-0.5, softcap=0.0, visible=None,
            bias=None, is_aligned=False,
        )  # fmt: skip
        model = requested_bytes(call, choose_tiles(call), with_block_lse=False)
        report(f"kv, 12 records, group {group}", "attend",
               lambda: attend(call, with_block_lse=False), model)  # noqa: B023  # fmt: skip


def count_ops() -> None:
    """Rational activations, forward and backward, and a layer of local filters."""
    from kernel_bytes.rational import backward_bytes, forward_bytes
    from kernel_bytes.windows import WindowBytes
    from penstock.ops.rational import _launch as rational
    from penstock.ops.windows import _launch as windows
    from penstock.ops.windows._filters import Filters
    from penstock.ops.windows._geometry import Windows

    call = (torch.randn(100, 96), torch.randn(3, 6), torch.randn(3, 4))
    report("ops, rational of 100 x 96", "evaluate",
           lambda: rational.forward(*call), forward_bytes(*call))  # fmt: skip
    report("ops, rational of 100 x 96", "differentiate",
           lambda: rational.backward(call[0], *call), backward_bytes(*call))  # fmt: skip
    of = Windows((3, 3), (1, 1), (1, 1), (1, 1))
    x, weight = torch.randn(4, 3, 8, 10), torch.randn(2, 3, 3, 3, 8, 10)
    model = WindowBytes(shape=x.shape, windows=of, element=4)
    report("ops, windows of 8 x 10", "unfold_rows", lambda: windows.unfold(x, of), model.unfold())
    report("ops, local filters of 8 x 10", "multiply",
           lambda: windows.multiply(x, weight, of, 1),
           model.multiply(Filters.of(x.shape, weight, 1)))  # fmt: skip


@contextlib.contextmanager
def launches_of_rgnn(case: str) -> Iterator[None]:
    """Report each launch of a relational layer."""
    from kernel_bytes.relations import launched_bytes
    from penstock.rgnn.backends.triton._launch import KernelLaunch

    run = KernelLaunch.__call__

    def count(launch: KernelLaunch) -> None:
        seen[launch.kernel.fn.__name__] = seen.get(launch.kernel.fn.__name__, 0) + 1
        name = f"{launch.kernel.fn.__name__}, launch {seen[launch.kernel.fn.__name__]}"
        report(case, name, lambda: run(launch), launched_bytes(launch))

    seen: dict[str, int] = {}
    with mock.patch.object(KernelLaunch, "__call__", count):
        yield


def count_rgnn() -> None:
    """The layers of `penstock.rgnn`, forward and backward."""
    graph = rgnn.Graph(torch.randint(0, 30, (2, 120)), torch.randint(0, 4, (120,)), num_nodes=30)
    graph_attention = rgnn.compile(attend_edges, backend="triton")
    x, weight = torch.randn(30, 8, requires_grad=True), torch.randn(4, 8, 8, requires_grad=True)
    with launches_of_rgnn("rgnn, attention over typed edges"):
        graph_attention(graph, x, weight, torch.randn(4, 8, requires_grad=True)).sum().backward()


def attend_edges(g: Any, x: Any, weight: Any, vector: Any) -> Any:
    """Attention over edges with a weight and a vector for each relation."""
    edges = g.edges
    message = edges.src(x) @ weight[edges.type]
    share = rgnn.edge_softmax(rgnn.dot(message, vector[edges.type]))
    return g.sum_to_dst(share * message)


@contextlib.contextmanager
def bounds_of_loops() -> Iterator[None]:
    """NumPy 2.4 makes no int of an array of one number, which is what the interpreter has."""
    scope = getattr(interpreter, "_LangPatchScope", None)
    if scope is None or np.lib.NumpyVersion(np.__version__) < "2.4.0":
        yield
        return
    set_attr = scope.set_attr

    def with_item(self: Any, target: Any, name: str, value: Any) -> None:
        if name == "__index__":
            value = lambda tensor: int(tensor.handle.data.item())  # noqa: E731
        set_attr(self, target, name, value)

    with mock.patch.object(scope, "set_attr", with_item):
        yield


if __name__ == "__main__":
    torch.manual_seed(0)
    np.seterr(all="ignore")  # lanes beyond a row compute numbers that are never read
    with bounds_of_loops():
        count_unified()
        count_lora()
        count_kv()
        count_ops()
        count_rgnn()
