"""Cases for the ranks of `test_sharded`: models that FSDP2 shards train eagerly and as planned.

A case returns names of what differs from eager training, or what it has measured. What a case that
fails returns is its traceback.
"""

from __future__ import annotations

import copy
import functools
import json
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.codegen import _cache
from penstock.errors import CaptureError
from penstock.executor import PlannedStep, average_gradients, bind
from penstock.graph import StepGraph, capture, run
from penstock.memory._caches import measure_pages
from penstock.planner import Plan, plan
from penstock.planner.paging import peak_of_program_order

NUM_RANKS, NUM_STEPS, NUM_WORDS = 2, 3, 11
MACHINE = "h200"
# How well the machine is measured is not what a case is about.
QUICK_PROBE: dict[str, Any] = {
    **{"_LINK_SECONDS": 0.0, "_RUN_SECONDS": 0.0, "_BOTH_WAYS_SECONDS": 0.01},
    **dict.fromkeys(("_MEMCPY_BYTES", "_REQUEST_BYTES", "_CACHE_RUN_BYTES"), 2**20),
    **{"_MATRIX_ROWS": {"cpu": 64}, "_VECTOR_BYTES": {"cpu": 2**16}},
    "measure_pages": functools.partial(measure_pages, num_runs=2, num_bytes=2**22),
}
Build = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]


class Block(nn.Module):
    """Attention and feed-forward; no size is a multiple of the number of ranks."""

    def __init__(self, width: int, hidden: int = 21, *, recompute: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute:
            return checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.attention(self.norm(x)).chunk(3, -1)
        x = x + nn.functional.scaled_dot_product_attention(query, key, value)
        return x + self.down(nn.functional.gelu(self.up(x)))


class Transformer(nn.Module):
    """Words in, words out; `scale` has one row, so that the last rank has nothing of it."""

    def __init__(
        self, *, num_blocks: int = 2, width: int = 9, tied: bool = False, **options: Any
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, width)
        self.blocks = nn.ModuleList(Block(width, **options) for _ in range(num_blocks))
        self.scale = nn.Parameter(torch.ones(1))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, NUM_WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x)) * self.scale


def loss_of(output: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1).float(), words.roll(1, 1).flatten())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def fused(parameters: Any) -> torch.optim.Optimizer:
    """Its plans keep more in several places, of which all have to follow what the user does."""
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def sharded(
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    *,
    change: Callable[[Transformer], object] = lambda model: None,
    of_root: dict[str, Any] | None = None,
    shared: bool = False,
    model_options: dict[str, Any] | None = None,
    **options: Any,
) -> Build:
    """Return a function that makes a sharded model and its optimizer, the same every time."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Transformer(**(model_options or {}))
        change(model)
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        if shared:
            fully_shard(list(model.blocks), mesh=mesh, **options)
        else:
            for block in model.blocks:
                fully_shard(block, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **(options if of_root is None else of_root))
        return model, optimizer(model.parameters())

    return build


ONE_BLOCK = {"num_blocks": 1}  # where neither a second block nor single operators matter
small = functools.partial(sharded, fused, model_options=ONE_BLOCK)
# Of several cases, which share their captured steps.
PLAIN, FUSED, SMALL = sharded(), sharded(fused), small()
_graphs: dict[Build, StepGraph] = {}
_eager_ends: dict[Build, dict[str, torch.Tensor]] = {}  # of training with nothing in between
_plans: dict[tuple[str, float, str], Plan] = {}  # by the graph's digest


def graph_of(build: Build, model: nn.Module, optimizer: torch.optim.Optimizer) -> StepGraph:
    """The captured step of a model, or that of another model of the same build."""
    if build not in _graphs:
        _graphs[build] = capture(model, optimizer, batches()[0], loss=loss_of)
    return _graphs[build]


def batches() -> torch.Tensor:
    generator = torch.Generator().manual_seed(distributed.get_rank())
    return torch.randint(0, NUM_WORDS, (NUM_STEPS, 4, 7), generator=generator)


def clip(model: nn.Module, norm_type: float = 2.0) -> Callable[[], object]:
    return lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type)


def eager_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: torch.Tensor,
    before_step: Callable[[], object] | None = None,
) -> torch.Tensor:
    optimizer.zero_grad()
    loss = loss_of(model(batch), batch)
    loss.backward()
    if before_step is not None:
        before_step()
    optimizer.step()
    return loss.detach()


def planned(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    store: Path | None = None,
    *,
    graph: StepGraph | None = None,
    share: float = 1.0,
    tier: str = "host",
    with_first_batch: bool = False,
    **options: Any,
) -> tuple[PlannedStep, StepGraph]:
    """Bind a plan for a share of the memory that the step would like to have.

    The graph is that of another model of the same build, or captured here.
    """
    if graph is None:
        graph = capture(model, optimizer, batches()[0], loss=loss_of, **options)
    found = plan_of(graph, share, tier, store)
    how: dict[str, Any] = options if with_first_batch else {"graph": graph}
    if tier == "file":
        how = how | {"store": store}
    return bind(found, model, optimizer, loss=loss_of, debug=True, **how), graph


def plan_of(graph: StepGraph, share: float, tier: str, store: Path | None) -> Plan:
    """Plan a step for a share of the memory that it would like to have, once."""
    if (key := (graph.digest, share, tier)) in _plans:
        return _plans[key]
    how: dict[str, Any] = {"machine": MACHINE, "time_limit": 0.05}
    how["seed"] = distributed.get_rank()  # ranks have plans of their own
    if share < 1:
        how["device_memory"] = int(plan_of(graph, 1, tier, store).peak_device_bytes * share)
        how |= {"store": store} if tier == "file" else {"host_memory": "1GiB"}
    found = _plans[key] = plan(graph, **how)
    assert found.transfers or share == 1
    return found


def whole(tensor: Any) -> torch.Tensor:
    if hasattr(tensor, "full_tensor"):
        return tensor.full_tensor()
    return torch.as_tensor(tensor).clone()


def own_part(tensor: Any) -> torch.Tensor:
    return torch.as_tensor(tensor.to_local() if hasattr(tensor, "to_local") else tensor).clone()


def everything(
    model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """All that training changes, copied: this rank's part of parameters and state.

    The other rank compares the other part; "saved" gathers both.
    """
    found = {f"loss.{number}": loss for number, loss in enumerate(losses)}
    found |= {name: own_part(tensor) for name, tensor in model.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"state.{number}.{key}": own_part(value) for key, value in state.items()}
    found["random"] = torch.get_rng_state()
    return found


def differing(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    assert left.keys() == right.keys(), left.keys() ^ right.keys()
    return [name for name, tensor in left.items() if not torch.equal(tensor, right[name])]


Between = Callable[[nn.Module, Any, int, dict[str, Any]], object]


def unlike_eager(
    build: Build,
    store: Path,
    *,
    between: Between | None = None,
    before_step: Callable[[nn.Module], Callable[[], object]] | None = None,
    ways: Sequence[dict[str, Any]] = ({},),
) -> list[str]:
    """Names of what differs between eager and planned training, with the same deeds in between.

    It is trained eagerly, and then in each way to plan. Models of the same build without deeds are
    trained eagerly once for all cases.
    """
    ends, graph = [], None
    for way in (None, *ways):
        is_plain = between is None and before_step is None
        if way is None and is_plain and build in _eager_ends:
            ends.append(_eager_ends[build])
            continue
        model, optimizer = build()
        before = None if before_step is None else before_step(model)
        step = None
        if way is not None:
            if before_step is None:
                graph = graph_of(build, model, optimizer)
            how = {"graph": graph, "before_step": before, **way}
            step, graph = planned(model, optimizer, store, **how)
        torch.manual_seed(1)
        losses, kept = [], {}
        for number, batch in enumerate(batches()):
            if between is not None:
                between(model, optimizer, number, kept)
            if step is None:
                losses.append(eager_step(model, optimizer, batch, before))
            else:
                losses.append(step(batch))
        found = everything(model, optimizer, losses)
        if step is not None:
            step.close()
        losses = [eager_step(model, optimizer, batch, before) for batch in batches()[:2]]
        after = everything(model, optimizer, losses)
        kept = {name: each for name, each in kept.items() if isinstance(each, torch.Tensor)}
        ends.append(found | {f"closed.{name}": each for name, each in after.items()} | kept)
        if way is None and is_plain:
            _eager_ends[build] = ends[0]
    eager, *others = ends
    return [name for each in others for name in differing(eager, each)]


def evaluate(model: nn.Module, optimizer: Any, number: int, kept: dict[str, Any]) -> None:
    """Leaves the root's parameters whole, as FSDP2 does."""
    model.eval()
    with torch.no_grad():
        kept[f"evaluated.{number}"] = loss_of(model(batches()[0]), batches()[0])
    model.train()


def save(model: nn.Module, optimizer: Any, number: int, kept: dict[str, Any]) -> None:
    state = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    kept |= {f"saved.{number}.{name}": tensor for name, tensor in state.items()}


def change_in_place(model: nn.Module, optimizer: Any, number: int, kept: dict[str, Any]) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
        for state in optimizer.state.values() if number else ():
            state["exp_avg"].add_(0.25)
            state["exp_avg_sq"].to_local().add_(0.25)


def back_to_the_first(model: nn.Module, optimizer: Any, number: int, kept: dict[str, Any]) -> None:
    if number == 1:
        kept["model"] = copy.deepcopy(model.state_dict())
        kept["optimizer"] = copy.deepcopy(optimizer.state_dict())
    if number == 2:
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])


def assign_the_first(model: nn.Module, optimizer: Any, number: int, kept: dict[str, Any]) -> None:
    """New DTensors take the place of the old ones; of an optimizer without state."""
    if number == 1:
        kept["model"] = copy.deepcopy(model.state_dict())
    if number == 2:
        model.load_state_dict(kept["model"], assign=True)
        optimizer.param_groups[0]["params"] = list(model.parameters())


def step_eagerly(model: nn.Module, optimizer: Any, number: int, kept: dict[str, Any]) -> None:
    if number:
        kept[f"eager.{number}"] = eager_step(model, optimizer, batches()[number])


def half_frozen(model: Transformer) -> None:
    for block in model.blocks:
        block.up.requires_grad_(False)  # pyright: ignore


def with_gradients_in_float64() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = SMALL()
    model.head.weight.grad_dtype = torch.float64
    return model, optimizer


def accumulated(store: Path) -> list[str]:
    """Micro-batches, each reduced by itself as FSDP2 does by default."""
    ends = []
    for is_planned in (False, True):
        model, optimizer = sharded(momentum, model_options=ONE_BLOCK)()
        parts = [*batches()[:2]]
        losses = []
        if is_planned:
            how: dict[str, Any] = {"accumulate": 2, "before_step": clip(model)}
            graph = capture(model, optimizer, parts, loss=loss_of, **how)
            found = plan(graph, machine=MACHINE, time_limit=0.05)
            with bind(found, model, optimizer, graph=graph, loss=loss_of, debug=True) as step:
                torch.manual_seed(1)
                losses = [step(parts) for _ in range(3)]
        else:
            torch.manual_seed(1)
            for _ in range(3):
                optimizer.zero_grad()
                total = torch.zeros(())
                for part in parts:
                    loss = loss_of(model(part), part) / 2
                    loss.backward()
                    total = total + loss.detach()
                clip(model)()
                optimizer.step()
                losses.append(total)
        ends.append(everything(model, optimizer, losses))
    return differing(*ends)


def run_by_operators(store: Path) -> list[str]:
    """The graph after a way through JSON, without a plan."""
    ends = []
    for is_captured in (False, True):
        model, optimizer = PLAIN()
        if is_captured:
            plain = graph_of(PLAIN, model, optimizer).to_dict()
            graph = StepGraph.from_dict(json.loads(json.dumps(plain)))
        torch.manual_seed(1)
        losses = [
            run(graph, model, optimizer, batch, loss=loss_of)
            if is_captured
            else eager_step(model, optimizer, batch)
            for batch in batches()
        ]
        ends.append(everything(model, optimizer, losses))
    return differing(*ends)


def fitted(store: Path) -> list[str]:
    """Measured, planned, kept and found again, by both ranks at once."""
    model, optimizer = SMALL()
    losses = []
    for _ in range(2):
        with (
            mock.patch.multiple("penstock.memory._probe", **QUICK_PROBE),
            penstock.fit(
                model, optimizer, batches()[0], loss=loss_of, device_memory="1MiB", time_limit=0.05
            ) as step,
        ):
            losses.append(step(batches()[0]).item())
    return [] if losses[1] < losses[0] else [str(losses)]


def two_shapes(store: Path) -> list[str]:
    """Plans for batches of two shapes take turns in one memory."""
    ends = []
    for is_planned in (False, True):
        model, optimizer = FUSED()
        step = None
        if is_planned:
            graphs = [
                graph_of(FUSED, model, optimizer),
                capture(model, optimizer, batches()[0][:3], loss=loss_of),
            ]
            (first, one), *others = [
                (plan(graph, machine=MACHINE, time_limit=0.05), graph) for graph in graphs
            ]
            step = bind(
                *(first, model, optimizer),
                graph=one,
                extra_plans=others,
                loss=loss_of,
                debug=True,
            )
        torch.manual_seed(1)
        losses = []
        for rows, batch in zip((4, 3, 3, 4), [*batches(), batches()[0]], strict=True):
            if step is None:
                losses.append(eager_step(model, optimizer, batch[:rows]))
            else:
                losses.append(step(batch[:rows]))
        ends.append(everything(model, optimizer, losses))
        if step is not None:
            step.close()
    return differing(*ends)


def gathered_bytes(store: Path) -> dict[str, Any]:
    """Return a step's peak at two depths, with and without freeing whole parameters."""
    found: dict[str, Any] = {}
    for name, reshards in (("kept", False), ("freed", True)):
        for depth in (1, 2):
            options = {"num_blocks": depth, "width": 33, "hidden": 127}
            model, optimizer = sharded(
                momentum, reshard_after_forward=reshards, model_options=options
            )()
            graph = capture(model, optimizer, batches()[0][:1], loss=loss_of)
            found[f"{name} {depth}"] = peak_of_program_order(graph)
    found["block"] = sum(each.numel() * 4 for each in Block(33, 127).parameters())
    return found


# What is refused.


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except CaptureError as error:
        return str(error)
    return "nothing was refused"


def refused(build: Build, **options: Any) -> Callable[[Path], str]:
    def case(store: Path) -> str:
        model, optimizer = build()
        arguments = {"loss": loss_of} | {
            key: value(model) if key == "before_step" else value for key, value in options.items()
        }
        return refusal(lambda: capture(model, optimizer, batches()[0], **arguments))

    return case


def on_mesh(shape: tuple[int, ...], *, width: int = 9, **options: Any) -> Build:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        names = ("replicate", "shard")[-len(shape) :]
        model = Transformer(width=width)
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names), **options)
        return model, adamw(model.parameters())

    return build


def tensor_parallel() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Transformer()
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight, mesh, [Replicate()]))
    return model, adamw(model.parameters())


def on_meta() -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.device("meta"):
        return on_mesh((NUM_RANKS,))()


def unsynchronised() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = SMALL()
    model.set_requires_gradient_sync(False)  # pyright: ignore
    return model, optimizer


def decayed(model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def loss(output: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return loss_of(output, words) + model.blocks[0].up.weight.square().sum()  # pyright: ignore

    return loss


def with_decay(store: Path) -> str:
    model, optimizer = SMALL()
    loss = decayed(model)
    return refusal(lambda: capture(model, optimizer, batches()[0], loss=loss))


def recovered(store: Path) -> list[str]:
    """After a capture that has failed in the middle of a forward pass FSDP2 works as before."""
    model, optimizer = SMALL()
    inner: Any = model.get_submodule("blocks.0.up")
    hook = inner.register_forward_pre_hook(lambda module, args: args[0].sum().item())
    message = refusal(lambda: capture(model, optimizer, batches()[0], loss=loss_of))
    hook.remove()
    ends = []
    for each in ((model, optimizer), SMALL()):
        torch.manual_seed(1)
        ends.append(everything(*each, [eager_step(*each, batch) for batch in batches()[:2]]))
    return differing(*ends) + ([] if "item()" in message else [message])


class Normalized(torch.optim.SGD):
    """Steps of one length, whatever the gradient's is."""

    def step(self, closure: Any = None) -> None:  # pyright: ignore
        for parameter in self.param_groups[0]["params"]:
            with torch.no_grad():
                parameter.sub_(parameter.grad / parameter.grad.norm())


def local_norms(model: nn.Module) -> Callable[[], object]:
    def shrink() -> None:
        first, *others = model.parameters()
        assert first.grad is not None
        first.grad = first.grad / first.grad.norm()  # another tensor from then on
        for parameter in others:
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

    return shrink


def unlike(build: Build, *ways: dict[str, Any], **options: Any) -> Callable[[Path], list[str]]:
    return lambda store: unlike_eager(build, store, ways=ways or ({},), **options)


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
COMPUTED_IN_HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
TIGHT_HOST = {"share": 0.6, "tier": "host"}
TIGHT_FILE = {"share": 0.6, "tier": "file"}
CASES: dict[str, Callable[[Path], Any]] = {
    # Names of what differs from eager training.
    "adamw": unlike(PLAIN, {}, TIGHT_HOST, TIGHT_FILE),
    "momentum": unlike(sharded(momentum), {}, TIGHT_HOST, TIGHT_FILE),
    "clipped": unlike(FUSED, TIGHT_HOST, before_step=clip),
    "clipped to the largest": unlike(
        sharded(momentum, change=lambda model: model.scale.requires_grad_(False)),
        before_step=lambda model: clip(model, float("inf")),
    ),
    "accumulated": accumulated,
    "kept whole": unlike(small(reshard_after_forward=False)),
    "root given up": unlike(small(of_root={"reshard_after_forward": True})),
    "several modules in one": unlike(sharded(fused, shared=True)),
    "tied": unlike(small(model_options=ONE_BLOCK | {"tied": True})),
    "frozen": unlike(small(change=half_frozen)),
    "checkpoints": unlike(small(model_options=ONE_BLOCK | {"recompute": True})),
    "bfloat16": unlike(small(mp_policy=HALF)),
    "bfloat16, no reduce_dtype": unlike(small(mp_policy=COMPUTED_IN_HALF)),
    "evaluated": unlike(PLAIN, TIGHT_FILE, between=evaluate),
    "saved": unlike(PLAIN, TIGHT_FILE, between=save),
    "changed in place": unlike(FUSED, TIGHT_HOST, between=change_in_place),
    "loaded": unlike(FUSED, TIGHT_HOST, between=back_to_the_first),
    "assigned": unlike(
        sharded(lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
        TIGHT_HOST,
        between=assign_the_first,
    ),
    "eager steps": unlike(PLAIN, TIGHT_HOST, between=step_eagerly),
    "eager fused steps": unlike(FUSED, TIGHT_HOST, between=step_eagerly),
    "operator by operator": run_by_operators,
    "fitted": fitted,
    "captured when bound": unlike(SMALL, {"with_first_batch": True}),
    "two shapes": two_shapes,
    "after a refusal": recovered,
    # Numbers.
    "gathered bytes": gathered_bytes,
    # Messages.
    "refused: HSDP": refused(on_mesh((1, NUM_RANKS))),
    "refused: columns": refused(
        on_mesh(
            (NUM_RANKS,),
            width=8,
            shard_placement_fn=lambda each: Shard(1) if each.shape[1:] == (8,) else None,
        )
    ),
    "refused: offloaded": refused(
        on_mesh((NUM_RANKS,), offload_policy=CPUOffloadPolicy(pin_memory=False))
    ),
    "refused: float16": refused(
        on_mesh((NUM_RANKS,), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    ),
    "refused: grad_dtype": refused(with_gradients_in_float64),
    "refused: tensor parallel": refused(tensor_parallel),
    "refused: meta": refused(on_meta),
    "refused: unsynchronised": refused(unsynchronised),
    "refused: outside": with_decay,
    "refused: own norm": refused(SMALL, before_step=local_norms),
    "refused: averaged": refused(SMALL, before_step=lambda model: lambda: average_gradients(model)),
    "refused: optimizer": refused(sharded(Normalized, model_options=ONE_BLOCK)),
}


def run_cases(names: list[str], store: Path, output: Path) -> dict[str, Any]:
    """Run cases on this rank; return by name what each has found."""
    _cache.private_directory = lambda folder: output  # plans of other runs stay out
    distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = CASES[name](store)
        except Exception:
            found[name] = {"error": traceback.format_exc()}
    return found
