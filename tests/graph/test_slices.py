"""Cross-entropy and softmaxes that run in slices give the same bits, piece by piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from _steps import Case, differences, unlike_eager
from penstock.graph import StepGraph, capture, run, split
from penstock.graph.splitting._choice import SliceSearch, needed_bytes
from penstock.graph.splitting._rewrite import rewrite_in_slices

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def everything_in_slices(graph: StepGraph) -> StepGraph:
    """Let all operators run in slices that can, however little they need."""
    search = SliceSearch(graph, 0, needed_bytes(graph))
    search.limit = 0
    search.chosen = {index for index in range(len(graph.operators)) if search.form(index)}
    return rewrite_in_slices(graph, search.run())


class Head(nn.Module):
    """A layer that gives logits, with some arithmetic behind it."""

    def __init__(self, width: int, dtype: torch.dtype, bias: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(8, width, bias=bias, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def head_case(
    *,
    num_vectors: int,
    width: int,
    dtype: torch.dtype,
    loss_dtype: torch.dtype,
    options: dict[str, Any],
    weighted: bool = False,
    num_ignored: int = 0,
    scale: float | None = None,
    bias: bool = False,
) -> Case:
    generator = torch.Generator().manual_seed(num_vectors * 1000 + width)
    x = torch.randn(2, num_vectors, 8, generator=generator).to(dtype)
    labels = torch.randint(0, width, (2, num_vectors), generator=generator)
    labels.view(-1)[:num_ignored] = options.get("ignore_index", -100)
    weight = torch.rand(width, generator=generator).to(loss_dtype) if weighted else None
    batch = {"x": x, "labels": labels} | ({"weight": weight} if weighted else {})

    def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        scores = output.to(loss_dtype)
        if scale is not None:
            scores = scores * scale
        found = F.cross_entropy(
            scores.view(-1, width), batch["labels"].view(-1), batch.get("weight"), **options
        )
        return found.mean() if found.dim() else found

    class Model(Head):
        def forward(self, x, labels, weight=None):
            return super().forward(x)

    return Case(lambda: Model(width, dtype, bias), batch, loss)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, foreach=False)


def new_trainee(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = case.make()
    return model, sgd(model.parameters())


def after_two_steps(case: Case, graph: StepGraph) -> dict[str, Any]:
    model, optimizer = new_trainee(case)
    losses = [run(graph, model, optimizer, case.batch) for _ in range(2)]
    state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
    return {"losses": losses} | state


@settings(max_examples=60, deadline=None)
@given(
    num_vectors=st.integers(1, 40),
    width=st.integers(2, 300),
    dtypes=st.tuples(st.sampled_from(sorted(DTYPES)), st.sampled_from(sorted(DTYPES))),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    smoothing=st.sampled_from([0.0, 0.1]),
    weighted=st.booleans(),
    ignore_index=st.sampled_from([-100, 0, 1, 1000]),
    num_ignored=st.integers(0, 5),
    scale=st.sampled_from([None, 0.5]),
)
@example(40, 300, ("bfloat16", "float32"), "mean", 0.0, False, -100, 3, None)
@example(40, 300, ("float32", "float32"), "mean", 0.1, True, 1, 3, 0.5)
@example(40, 300, ("bfloat16", "bfloat16"), "sum", 0.0, True, -100, 80, 0.5)
def test_the_bits_are_those_of_the_whole(
    num_vectors, width, dtypes, reduction, smoothing, weighted, ignore_index, num_ignored, scale
):
    case = head_case(
        num_vectors=num_vectors,
        width=width,
        dtype=DTYPES[dtypes[0]],
        loss_dtype=DTYPES[dtypes[1]],
        options={
            "reduction": reduction,
            "label_smoothing": smoothing,
            "ignore_index": ignore_index,
        },
        weighted=weighted,
        num_ignored=num_ignored,
        scale=scale,
    )
    # Not eager's: of smoothed labels with weights of classes it adds in an order that depends on
    # the data.
    whole = capture(*new_trainee(case), case.batch, loss=case.loss)
    graphs = whole, everything_in_slices(whole)
    assert [any("[0]" in o.name for o in graph.operators) for graph in graphs] == [False, True]
    ends = [after_two_steps(case, graph) for graph in graphs]
    assert differences(*ends, "") == []


def whole_and_parts(case: Case, max_bytes: int = 1) -> tuple[StepGraph, StepGraph]:
    model = case.make()
    graph = capture(model, sgd(model.parameters()), case.batch, loss=case.loss)
    return graph, split(graph, max_bytes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_products_need_more_than_a_piece(dtype):
    """As much as the layer that makes the logits, whose products stay whole."""
    case = head_case(
        num_vectors=512,
        width=1000,
        dtype=DTYPES[dtype],
        loss_dtype=torch.float32,
        options={},
        num_ignored=7,
    )
    graph, parts = whole_and_parts(case)
    needed = dict(zip((o.name for o in parts.operators), needed_bytes(parts), strict=True))
    products = max(count for name, count in needed.items() if name.startswith("mm"))
    logits = 1024 * 1000 * (2 if dtype == "bfloat16" else 4)
    assert max(needed.values()) <= 1.02 * products < 1.1 * logits
    assert max(needed_bytes(graph)) >= 2 * 1024 * 1000 * 4
    for count in ("flops", "bytes_read", "bytes_written"):
        before, after = (sum(getattr(o, count) for o in g.operators) for g in (graph, parts))
        assert abs(after - before) <= 0.01 * before
    assert unlike_eager(case, sgd, change=lambda graph: split(graph, 1)) == []


def test_the_gradient_takes_the_place_of_the_probabilities():
    """Logits of the loss's own dtype: one whole storage for all three, and small pieces."""
    case = head_case(
        num_vectors=512, width=1000, dtype=torch.float32, loss_dtype=torch.float32, options={}
    )
    graph, parts = whole_and_parts(case)
    logits = 1024 * 1000 * 4
    whole = [s for s in graph.storages if s.num_bytes == logits]
    left = [s for s in parts.storages if s.num_bytes == logits]
    assert len(whole) == 4  # logits, their log-softmax, and the gradients of both
    assert len(left) == 2  # of which a result may take the place of the other
    assert len([o for o in parts.operators if o.mutates and "out" in o.kwargs]) > 1


def test_classes_that_do_not_exist_are_refused_as_before():
    case = head_case(
        num_vectors=4, width=10, dtype=torch.float32, loss_dtype=torch.float64, options={}
    )
    case.batch["labels"][0, 0] = 10
    with pytest.raises(IndexError, match="out of bounds"):
        unlike_eager(case._replace(loss=case.loss), sgd, change=everything_in_slices)


def attention_case() -> Case:
    """Softmax and dropout between two products: what is between them becomes pieces."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 48)

        def forward(self, x):
            q, k, v = self.layer(x).chunk(3, -1)
            weights = F.softmax(q @ k.transpose(-1, -2) * 0.25, -1)
            return (F.dropout(weights, 0.1) @ v).square().mean()

    return Case(Attention, (torch.randn(3, 64, 16),))


def test_softmax_between_products_runs_in_slices_too():
    seen = []

    def change(graph: StepGraph) -> StepGraph:
        parts = everything_in_slices(graph)
        seen.append(sum("[1]" in operator.name for operator in parts.operators))
        return parts

    assert unlike_eager(attention_case(), sgd, change=change) == []
    assert seen[0] >= 2


def test_vectors_that_lie_apart_stay_whole():
    """A softmax over another dimension than the last has its vectors across all of the memory."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 6)

        def forward(self, x):
            return F.log_softmax(self.layer(x), 1).sum()

    graph, parts = whole_and_parts(Case(Model, (torch.randn(8, 5, 4),)))
    targets = [[o.target for o in g.operators if "softmax" in o.target] for g in (graph, parts)]
    assert targets[0] == targets[1]
