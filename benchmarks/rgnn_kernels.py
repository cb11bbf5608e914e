"""Registers, shared memory and spills of the Triton kernels of relational layers.

Every kernel of a training step of RGCN, RGAT and HGT with 64 features is compiled for an H100 and
for an MI300; no GPU is needed. The graph has groups of every size, so that all kernels occur. The
time of a row is that of the compiler. Spilled registers are held against none.

    python3 benchmarks/rgnn_kernels.py
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from _kernel_resources import TARGETS, Compiled, compile_launch, recorded
from _rows import BenchmarkRow, argument_parser, environment, write_rows
from penstock import rgnn

if TYPE_CHECKING:
    from penstock.rgnn.backends.triton._launch import KernelLaunch

TOPIC = "rgnn_kernels"
DIM = 64
NUM_RELATIONS = 4
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HEADS = {"rgcn": (1,), "rgat": (1, 4), "hgt": (1, 4), "hgt_of_features": (1, 4)}


def graph_of_all_sizes() -> rgnn.Graph:
    """Return a graph of nodes with no, a few, hundreds and thousands of edges, at both ends."""
    generator = torch.Generator().manual_seed(0)
    num_nodes = 4096
    degrees = torch.randint(0, 6, (num_nodes,), generator=generator)
    degrees[:5] = torch.tensor([10_000, 600, 200, 20, 0])
    hubs = torch.repeat_interleave(torch.arange(num_nodes), degrees)
    others = torch.randint(num_nodes, (len(hubs),), generator=generator)
    ends = torch.stack([torch.cat([hubs, others]), torch.cat([others, hubs])])
    relations = torch.randint(NUM_RELATIONS, (ends.shape[1],), generator=generator)
    return rgnn.Graph(ends, relations, num_nodes=num_nodes, num_relations=NUM_RELATIONS)


def program_of(layer: str, heads: int, graph: rgnn.Graph, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return a layer's compiled function and its arguments."""
    from penstock.rgnn.layers import _hgt, _rgat, _rgcn

    def made(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, requires_grad=True)

    x, weight = made(graph.num_nodes, DIM), made(NUM_RELATIONS, DIM, DIM)
    if layer == "rgcn":
        return _rgcn.rgcn, x, weight, None, made(DIM, DIM), made(DIM), None, True
    if layer == "rgat":
        projections = made(DIM, heads), made(DIM, heads), made(DIM)
        return _rgat.rgat, x, weight, None, *projections, None, heads, True, 0.2, "destination"
    if layer == "hgt_of_features":
        weights = (weight, made(NUM_RELATIONS, DIM)) * 2
        queries, factors = made(graph.num_nodes, DIM), made(NUM_RELATIONS, heads)
        return _hgt.hgt_of_features, x, queries, *weights, factors, heads
    width = DIM // heads
    of_relations = made(NUM_RELATIONS, heads, width, width)
    keys = (x, made(graph.num_nodes, DIM), made(graph.num_nodes, DIM))
    relations = (of_relations, made(*of_relations.shape), made(NUM_RELATIONS, heads))
    return _hgt.hgt, *keys, *relations, heads


def launches_of(function: Any, graph: rgnn.Graph, *arguments: Any) -> list[KernelLaunch]:
    """Return the launches of a training step; nothing is computed."""
    from penstock.rgnn._compiled_program import CompiledProgram
    from penstock.rgnn.backends.triton import TritonBackend
    from penstock.rgnn.passes import optimize

    traced, tensors = function._trace_call(graph, arguments, {})
    wrt = tuple(traced.program.inputs())
    program = CompiledProgram(optimize(traced.program, graph.counts, wrt=wrt), "triton")

    backend = program.run_direction
    assert isinstance(backend, TritonBackend)

    def run(launch: Callable[[KernelLaunch], None]) -> None:
        program.run_direction = lambda invocation: backend.run(invocation, launch)
        results = program(graph, [tensors[name] for name in program.names])
        total = sum(result.sum() for result in results)
        assert isinstance(total, torch.Tensor)
        total.backward()

    return recorded(run)


def unique_launches(launches: list[KernelLaunch]) -> dict[str, KernelLaunch]:
    """Return one launch for each kernel that is compiled, by a name with its constants."""
    found: dict[str, KernelLaunch] = {}
    for launch in launches:
        constants = dict(launch.constants)
        said = [f"{name} {constants[name]}" for name in _SAID if name in constants]
        said += ["transposed"] if constants.get("TRANSPOSED") else []
        said += [
            flag.removeprefix("HAS_").replace("_", " ").lower()
            for flag in constants
            if flag.startswith("HAS_") and constants[flag]
        ]
        found.setdefault(f"{launch.kernel.__name__}, {', '.join(said)}", launch)
    return found


_SAID = ("GROUPS", "ROWS", "FEATURES", "HEADS", "INNER", "HEIGHT", "WIDTH", "LENGTH")


def row_of(case: str, target: str, compiled: Compiled, where: Any) -> BenchmarkRow:
    """Return the row of one kernel on one target."""
    return BenchmarkRow.of(
        [compiled.seconds],
        topic=TOPIC,
        case=case,
        arm=target,
        extra=dataclasses.asdict(compiled.resources),
        **where,
    )


def main() -> None:
    """Compile everything that was asked for and write a row for each kernel and target."""
    parser = argument_parser(__doc__)
    parser.add_argument("--layer", choices=list(HEADS), nargs="*", default=list(HEADS))
    parser.add_argument("--dtype", choices=list(DTYPES), nargs="*", default=list(DTYPES))
    options = parser.parse_args()
    where = environment("cpu") | {"device_name": "compile"}
    graph = graph_of_all_sizes()
    with tempfile.TemporaryDirectory() as directory:
        os.environ["TRITON_CACHE_DIR"] = directory  # a kernel out of a cache takes no time
        for layer in options.layer:
            for heads in HEADS[layer]:
                for dtype in options.dtype:
                    name = f"{layer} {dtype} {DIM} features {heads} heads"
                    program = program_of(layer, heads, graph, DTYPES[dtype])
                    found = unique_launches(launches_of(program[0], graph, *program[1:]))
                    rows = [
                        row_of(f"{name}: {kernel}", target, compile_launch(launch, target), where)
                        for kernel, launch in found.items()
                        for target in TARGETS
                    ]
                    write_rows(rows, options.out)
                    for row in rows:
                        print(f"{row.arm} {row.case}: {row.extra}")


if __name__ == "__main__":
    main()
