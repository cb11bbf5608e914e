"""One layer on one graph, in all arms: the process that `rgnn.py` starts for each case.

It may take so many bytes and no more, so an arm that needs them all runs out of memory here and not
on the whole machine; that is a result. What was found is printed as JSON, one object a line; an arm
is announced before it is tried, so that the parent knows which one took the process down.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import resource
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import _rgnn_graphs
from _rgnn_arms import EDGEWISE, Arm, Layer, OurProgram, maker, ours
from _rgnn_edgewise import SortedEdges
from _rgnn_roofline import kernel_facts, measured_roofline
from _rgnn_steps import MODES, TRAINING, Step, error_of, measure
from penstock import rgnn
from penstock.rgnn import Explanation, Graph

NUM_PREPARATIONS = 3
MOST_CHECKED_EDGES = 2_000_000  # of a larger graph some nodes are checked, edge by edge
CHECKED_NODES = 1 / 64


def say(event: str, **fields: Any) -> None:
    """Print an event for the parent."""
    print(json.dumps({"event": event, **fields}), flush=True)


class Case:
    """The arms and modes that one process measures.

    Args:
        layer: The layer.
        device: "cpu" or a CUDA device.
        backends: Ours to measure.
        ablate: Those of them that are measured with each rewrite off, too.
        others: The arms that are not ours.
        modes: Of `MODES`.
    """

    def __init__(
        self,
        layer: Layer,
        device: str,
        backends: list[str],
        ablate: list[str],
        others: list[str],
        modes: Sequence[str] = MODES,
    ) -> None:
        self.layer, self.device, self.modes = layer, device, modes
        self.makers: dict[str, Callable[[], Arm]] = {name: maker(layer, name) for name in others}
        self.programs = {backend: OurProgram(layer, backend) for backend in backends}
        self._unchanged: dict[str, dict[str, list[str]]] = {}
        self._checked: torch.Tensor | None = None
        if layer.graph.num_edges > MOST_CHECKED_EDGES:
            generator = torch.Generator().manual_seed(2)
            drawn = torch.rand(layer.graph.num_nodes, generator=generator)
            self._checked = (drawn < CHECKED_NODES).to(layer.graph.device)
        for backend, program in self.programs.items():
            self.makers[ours(backend)] = program.arm
            if backend in ablate:
                self._add_ablations(backend)

    def run(self, budget_seconds: float) -> None:
        """Try all arms, then measure those that worked."""
        expected = self._expected()
        steps = {name: self._try(name, make, expected) for name, make in self.makers.items()}
        del expected
        for mode in self.modes:
            of_mode = {name: found[mode] for name, found in steps.items() if mode in found}
            for name, seconds in measure(of_mode, budget_seconds).items():
                say("measured", arm=name, mode=mode, seconds=seconds)
        for backend, program in self.programs.items():
            for mode in self.modes:
                plan = program.explain(training=mode == TRAINING)
                facts = plan_facts(plan)
                if backend in self._unchanged:
                    facts["rewrites_that_change_nothing"] = self._unchanged[backend][mode]
                say("planned", arm=ours(backend), mode=mode, **facts)
            if TRAINING in steps[ours(backend)]:
                if self.device != "cpu":
                    roofline = measured_roofline(self.device)
                    kernels = kernel_facts(self.layer, program, backend, roofline)
                    fields = {"roofline": dataclasses.asdict(roofline), "kernels": kernels}
                    say("kernels", arm=ours(backend), mode=TRAINING, **fields)
                seconds = self._preparation_seconds(program, steps[ours(backend)][TRAINING])
                say("prepared", arm=ours(backend), seconds=seconds)
        for name in self.makers:
            if name.startswith(EDGEWISE):
                say("prepared", arm=name, seconds=self._sorting_seconds(name))

    def _add_ablations(self, backend: str) -> None:
        """Add arms without a rewrite, but for those with the same program."""
        training = {mode: mode == TRAINING for mode in MODES}
        program = self.programs[backend]
        full = {mode: program.explain(training=training[mode]).kernels for mode in MODES}
        unchanged: dict[str, list[str]] = {mode: [] for mode in MODES}
        for without in [*((name,) for name in rgnn.REWRITES), rgnn.REWRITES]:
            ablated = OurProgram(self.layer, backend, without)
            same = [m for m in MODES if ablated.explain(training=training[m]).kernels == full[m]]
            if len(same) < len(MODES):
                self.makers[ours(backend, without)] = ablated.arm
            for mode in same if len(without) == 1 else ():
                unchanged[mode] += without
        self._unchanged[backend] = unchanged

    def _expected(self) -> dict[str, list[torch.Tensor]]:
        """Return the results and gradients that every arm is held against.

        On a large graph those of some nodes, with the gradients that come from these nodes alone:
        both follow from the edges into them.
        """
        arm = self.layer.edgewise(csr=False, among=self._checked)
        return {mode: self._checked_step(arm, mode).answers() for mode in self.modes}

    def _checked_step(self, arm: Arm, mode: str) -> Step:
        among = None if self._checked is None else self.layer.rows_of_results(self._checked)
        return Step(arm, mode, self.device, among)

    def _try(
        self, name: str, make: Callable[[], Arm], expected: dict[str, list[torch.Tensor]]
    ) -> dict[str, Step]:
        """Run an arm once in each mode: its steps by mode, until it runs out of memory."""
        arm, steps = None, {}
        for mode in self.modes:
            say("trying", arm=name, mode=mode)
            start = time.perf_counter()
            try:
                arm = arm or make()
                check = self._checked_step(arm, mode)
                found = check.answers()
                first_seconds = time.perf_counter() - start
                error = error_of(found, expected[mode])
                del found
                step = check.everywhere()
                peak_bytes = step.peak_bytes()
            except (RuntimeError, MemoryError) as failure:
                if not is_out_of_memory(failure):
                    raise
                say("failed", arm=name, mode=mode, seconds=time.perf_counter() - start)
                break  # what cannot train is of no use for inference either
            steps[mode] = step
            say(
                "tried",
                arm=name,
                mode=mode,
                first_seconds=first_seconds,
                largest_error=error,
                peak_bytes=peak_bytes,
            )
        return steps

    def _preparation_seconds(self, program: OurProgram, usual: Step) -> list[float]:
        """Return the seconds of the first step on a new graph beyond a usual one."""
        graph = self.layer.graph
        edge_index, edge_type = graph.edge_index, graph.edge_type
        node_type = _rgnn_graphs.node_types(graph).to(graph.device)
        seconds = []
        for _ in range(NUM_PREPARATIONS):
            start = time.perf_counter()
            fresh = Graph(
                edge_index,
                edge_type,
                num_nodes=graph.num_nodes,
                num_relations=graph.num_relations,
                node_type=node_type,
                num_node_types=graph.num_node_types,
            )
            made = time.perf_counter() - start
            first = Step(program.arm(fresh), TRAINING, self.device).timed()
            seconds.append(max(0.0, made + first - usual.timed()))
        return seconds

    def _sorting_seconds(self, name: str) -> list[float]:
        """Return the seconds of the edgewise arm before its first step."""
        seconds = []
        for _ in range(NUM_PREPARATIONS):
            start = time.perf_counter()
            SortedEdges.of(self.layer.graph, csr=name != EDGEWISE)
            seconds.append(time.perf_counter() - start)
        return seconds


def is_out_of_memory(failure: Exception) -> bool:
    """Return whether an error says so, of any allocator."""
    text = str(failure)
    return isinstance(failure, MemoryError) or bool(
        re.search(r"out of memory|can't allocate memory|bad_alloc", text)
    )


def plan_facts(plan: Explanation) -> dict[str, Any]:
    """Return a program's decisions: bytes, products, and the rows chosen in place of edges.

    `rows_over_edges` are all edge and pair rows that the plan writes, over what they would be with
    a row for each edge, weighted by the bytes of a row.
    """
    written = edgewise = 0.0
    for kernel in plan.kernels:
        for value in kernel.values:
            if value.memory_bytes and value.rows_of in (
                "edge",
                "(src, relation)",
                "(dst, relation)",
            ):
                written += value.memory_bytes
                edgewise += value.memory_bytes * plan.num_edges / value.num_rows
    return {
        "materialised_bytes": plan.materialised_bytes,
        "multiplications": plan.multiplications,
        "rows_over_edges": written / edgewise if edgewise else 1.0,
        "applied": sorted({d.rewrite for d in plan.decisions if d.applied}),
    }


def limit_memory(num_bytes: int) -> None:
    """Limit this process to so many bytes of addresses beyond those that it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--graph", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory-bytes", type=int, default=0, help="0: no limit")
    parser.add_argument("--budget-seconds", type=float, default=2.0)
    parser.add_argument("--backends", nargs="*", default=[])
    parser.add_argument("--ablate", nargs="*", default=[])
    parser.add_argument("--others", nargs="*", default=[])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", "Sparse CSR tensor support")  # PyTorch says it of each use
    graph = _rgnn_graphs.load(options.graph, typed=options.model == "HGT").to(options.device)
    say("graph", **dataclasses.asdict(graph.counts))
    layer = Layer(options.model, graph, options.width)
    if options.memory_bytes and options.device == "cpu":
        limit_memory(options.memory_bytes)
    arms = (options.backends, options.ablate, options.others)
    case = Case(layer, options.device, *arms, options.modes)
    case.run(options.budget_seconds)


if __name__ == "__main__":
    main()
