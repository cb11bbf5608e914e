"""Every public capability once on a device, with results compared to the CPU: does it work there?

    python benchmarks/smoke.py --device cuda     # under 90 seconds
    python benchmarks/smoke.py                   # the same on the CPU, against itself

The reference is PyTorch on the CPU without Penstock. A row's time is that of the check, not of what
it checks; `extra` has the largest relative error, which the limit bounds. The exit status is 1 if a
check failed; the others run all the same.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from _rows import (
    REPOSITORY,
    BenchmarkRow,
    Limit,
    announce,
    argument_parser,
    environment,
    write_rows,
)

TOPIC = "smoke"
LIMIT = Limit(name="relative error", value=1e-4, unit="1")
STEPS = 3
SCRIPT = """
import sys, torch
from torch import nn
device = globals().get("device") or sys.argv[1]
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)])
batch = torch.randn(2048, 256)
model, batch = model.to(device), batch.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for _ in range(3):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    print(repr(loss.item()))
"""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a check runs."""

    device: str
    store: str
    """A directory for files."""


Results = list[torch.Tensor]
Check = Callable[[Place], Iterator[tuple[Results, Results]]]
CHECKS: dict[str, Check] = {}


def check(name: str) -> Callable[[Check], Check]:
    """Enter a function that yields pairs of results and what they have to be."""

    def entered(function: Check) -> Check:
        CHECKS[name] = function
        return function

    return entered


def trained(
    model: nn.Module, batch: torch.Tensor, device: str, steps: Callable[..., Results] | None = None
) -> Results:
    """Losses and parameters after a few steps on a device; `steps` takes them another way."""
    model, batch = copy.deepcopy(model).to(device), batch.to(device)
    # With the usual eps, gradients that are zero but for rounding would move parameters as far as
    # any other, in the direction of the rounding.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    losses = (steps or ordinary_steps)(model, optimizer, batch)
    return [*losses, *(each.detach() for each in model.parameters())]


def ordinary_steps(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> Results:
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = mean_square(model(batch), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def mean_square(output: torch.Tensor, _: Any) -> torch.Tensor:
    return output.square().mean()


def layers(width: int, depth: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(depth)]
    )


def offloaded(place: Place, store: str | None) -> Iterator[tuple[Results, Results]]:
    import penstock

    def steps(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> Results:
        with penstock.offload(store, policy="all", min_bytes=1024) as offload:
            losses = ordinary_steps(model, optimizer, batch)
        if not offload.report().offloaded_bytes:
            raise AssertionError("nothing was offloaded")
        return losses

    model, batch = layers(256, 4), torch.randn(1024, 256)
    there = trained(model, batch, place.device, steps)
    yield there, trained(model, batch, "cpu")
    yield there, trained(model, batch, place.device)


@check("offload to host memory")
def offload_host(place: Place) -> Iterator[tuple[Results, Results]]:
    """On the CPU there is no tier of host memory beside it: the file takes its place."""
    yield from offloaded(place, None if place.device.startswith("cuda") else place.store)


@check("offload to a file")
def offload_file(place: Place) -> Iterator[tuple[Results, Results]]:
    yield from offloaded(place, place.store)


@check("fit at 1/4 of the memory")
def fit(place: Place) -> Iterator[tuple[Results, Results]]:
    import penstock

    def steps(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> Results:
        graph = penstock.capture(model, optimizer, batch, loss=mean_square)
        full = penstock.plan(graph, machine="h200", time_limit=1)
        on_gpu = place.device.startswith("cuda")
        step = penstock.fit(
            *(model, optimizer, batch),
            loss=mean_square,
            device_memory=full.peak_device_bytes // 4,
            host_memory="1GiB" if on_gpu else None,
            store=None if on_gpu else place.store,
            time_limit=1,
            machine="h200",
        )
        with step:
            return [step(batch).detach().clone() for _ in range(STEPS)]

    model, batch = layers(128, 8), torch.randn(512, 128)
    there = trained(model, batch, place.device, steps)
    yield there, trained(model, batch, "cpu")


def table_steps(table: Any, optimizer: Any, rows: torch.Tensor, device: str) -> Results:
    """Losses of steps on rows of a table."""
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.embedding(rows.to(device), table).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def table_results(place: Place, path: str | None) -> Iterator[tuple[Results, Results]]:
    import penstock

    torch.manual_seed(0)
    values, rows = torch.randn(20_000, 64), torch.randint(20_000, (4096,))
    table = penstock.unified.empty(values.shape, path=path, device=place.device, requires_grad=True)
    with torch.no_grad():
        table.index_copy_(0, torch.arange(len(values)), values)
    optimizer = penstock.unified.optim.SGD([table], lr=10.0)
    there = table_steps(table, optimizer, rows, place.device)
    plain = values.clone().requires_grad_()
    here = table_steps(plain, torch.optim.SGD([plain], lr=10.0), rows, "cpu")
    everything = torch.arange(len(values), device=place.device)
    yield [*there, table.detach()[everything]], [*here, plain.detach()]


@check("a table in host memory")
def table_host(place: Place) -> Iterator[tuple[Results, Results]]:
    yield from table_results(place, None)


@check("a table in a file")
def table_file(place: Place) -> Iterator[tuple[Results, Results]]:
    yield from table_results(place, str(Path(place.store, "table")))


@check("RGCN and RGAT")
def relational(place: Place) -> Iterator[tuple[Results, Results]]:
    """A program by the device's own backend and two layers, against float64 on the CPU."""
    from penstock import rgnn

    def convolve(g: Any, x: Any, weight: Any) -> Any:
        e = g.edges
        return g.sum_to_dst(rgnn.edge_mean(e.src(x) @ weight[e.type]))

    torch.manual_seed(0)
    ends, types = torch.randint(0, 500, (2, 6000)), torch.randint(0, 7, (6000,))
    graph = rgnn.Graph(ends, types, num_nodes=500)
    program = rgnn.compile(
        convolve, backend="triton" if place.device.startswith("cuda") else "auto"
    )

    def plainly(_: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The mean over a node's edges of each relation, summed over relations."""
        groups = types * 500 + ends[1]
        messages = torch.einsum("ei,eio->eo", x[ends[0]], weight[types])
        counts = torch.bincount(groups, minlength=3500).clamp(min=1)
        sums = messages.new_zeros(3500, messages.shape[1]).index_add(0, groups, messages)
        return (sums / counts[:, None]).view(7, 500, -1).sum(0)

    x, weight = torch.randn(500, 64), torch.randn(7, 64, 32) / 8

    def results(run: Callable[..., torch.Tensor], device: str, dtype: torch.dtype) -> Results:
        leaves = [each.to(device, dtype, copy=True).requires_grad_() for each in (x, weight)]
        output = run(graph.to(device), *leaves)
        return [output.detach(), *torch.autograd.grad(output.square().sum(), leaves)]

    yield results(program, place.device, torch.float32), results(plainly, "cpu", torch.float64)
    for layer in (rgnn.RGCNConv(64, 32, 7), rgnn.RGATConv(64, 32, 7)):
        found = []
        for device, dtype in ((place.device, torch.float32), ("cpu", torch.float64)):
            module = copy.deepcopy(layer).to(device, dtype)
            leaf = x.to(device, dtype, copy=True).requires_grad_()
            output = module(leaf, graph.to(device))
            wanted = [leaf, *module.parameters()]
            found.append([output.detach(), *torch.autograd.grad(output.square().sum(), wanted)])
        yield found[0], found[1]


@check("DynamicBatcher")
def dynamic(place: Place) -> Iterator[tuple[Results, Results]]:
    from penstock.batching import DynamicBatcher, TypedGraph

    class Join(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(64, 32)

        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.mix(torch.cat([left, right], dim=1)))

    graphs = []
    for count in range(2, 20):
        graph = TypedGraph()
        nodes = [graph.add("word", inputs=[k]) for k in range(count)]
        while len(nodes) > 1:
            nodes = [*nodes[2:], graph.add("join", nodes[0], nodes[1])]
        graphs.append(graph)
    for max_bytes in (None, "512KiB"):
        torch.manual_seed(0)
        cells = {"word": nn.Embedding(20, 32), "join": Join()}
        batcher = DynamicBatcher(cells, max_bytes=max_bytes)
        results = []
        for device in (place.device, "cpu"):
            batcher.to(device).zero_grad()
            last = batcher(graphs).last()
            last.square().sum().backward()
            gradients = [
                each.grad.clone() for each in batcher.parameters() if each.grad is not None
            ]
            results.append([last.detach(), *gradients])
        yield results[0], results[1]


@check("batches below a cap of measured bytes")
def batches(place: Place) -> Iterator[tuple[Results, Results]]:
    from penstock.batching import BalancedBatchSampler, ByteModel, measured_peak, probe_batches

    # What libraries of a GPU keep for themselves is small beside these; a CPU's keep nothing.
    unit = 1000 if place.device.startswith("cuda") else 100
    lengths = torch.randint(unit, 20 * unit, (60,), generator=torch.Generator().manual_seed(0))
    weight = torch.randn(64, 64, device=place.device, requires_grad=True)

    def step(batch: list[int]) -> None:
        x = torch.ones(int(lengths[batch].sum()), 64, device=place.device)
        (x @ weight).relu().sum().backward()
        weight.grad = None

    features = {"rows": lengths}
    model = ByteModel.fit(step, probe_batches(features), features, device=place.device)
    cap = unit << 16
    peaks = [
        measured_peak(lambda batch=batch: step(batch), place.device)[0]
        for batch in BalancedBatchSampler(model.costs(features), max_bytes=cap)
    ]
    if max(peaks) > cap:
        raise AssertionError(f"a batch took {max(peaks)} bytes of {cap}")
    yield [torch.tensor(1.0)], [torch.tensor(1.0)]


@check("penstock run on a script")
def command_line(place: Place) -> Iterator[tuple[Results, Results]]:
    script, report = Path(place.store, "script.py"), Path(place.store, "report.json")
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "penstock", "run", "--policy", "all", "--store", place.store]
    command += ["--report", str(report), str(script), place.device]
    path = os.pathsep.join([str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"exit status {done.returncode}: {done.stderr[-2000:]}")
    if not json.loads(report.read_text())["offload"]["offloaded_bytes"]:
        raise AssertionError("nothing was offloaded")
    yield losses_of(done.stdout), losses_of(run_here(place.device))
    yield losses_of(done.stdout), losses_of(run_here("cpu"))


def losses_of(said: str) -> Results:
    lines = said.split()[:STEPS]
    if len(lines) < STEPS:
        raise AssertionError(f"the script printed {said!r} instead of {STEPS} losses")
    return [torch.tensor(float(line)) for line in lines]


def run_here(device: str) -> str:
    """Return what the script prints in this process, without Penstock."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(SCRIPT, {"__name__": "__main__", "device": device})
    return said.getvalue()


def largest_error(results: Results, expected: Results) -> float:
    """The largest relative error of a tensor, by norms; infinite where it is not a number."""
    worst = 0.0
    for mine, theirs in zip(results, expected, strict=True):
        mine, theirs = mine.detach().cpu().double(), theirs.detach().cpu().double()
        error = float((mine - theirs).norm() / theirs.norm().clamp(min=1e-12))
        worst = max(worst, error) if error == error else float("inf")
    return worst


def run_check(name: str, place: Place, where: Any) -> BenchmarkRow:
    """Run a check; its row says how long it took and how far off results were."""
    begin = time.perf_counter()
    errors = [largest_error(mine, theirs) for mine, theirs in CHECKS[name](place)]
    error = max(errors)
    if not error <= LIMIT.value:
        raise AssertionError(f"relative error {error:.3g}, more than {LIMIT.value:.3g}")
    return BenchmarkRow.of(
        [time.perf_counter() - begin],
        topic=TOPIC,
        case=name,
        arm="penstock",
        limit=LIMIT,
        measured=error,
        **where,
    )


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--checks", nargs="+", choices=list(CHECKS), default=list(CHECKS))
    options = parser.parse_args()
    if options.dry_run:
        announce((name, "penstock") for name in options.checks)
        return 0
    torch.backends.cuda.matmul.allow_tf32 = False
    where = environment(options.device)
    failed = 0
    for name in options.checks:
        with tempfile.TemporaryDirectory() as store:
            try:
                row = run_check(name, Place(options.device, store), where)
            except Exception:
                failed += 1
                print(f"smoke: {name}: FAILED", file=sys.stderr)
                traceback.print_exc()
                continue
        print(row, flush=True)
        write_rows([row], options.out)
    print(f"smoke: {len(options.checks) - failed} of {len(options.checks)} checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
