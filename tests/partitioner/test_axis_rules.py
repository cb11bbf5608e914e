"""Every rule of the axis table, on real tensors: ranks run their pieces, and the pieces together
are what the operator makes of the whole.

Along a letter of a result, pieces are concatenated; over a letter that it sums over, they are added
up; a result without the letter is the same on every rank. What a rank is to be handed beside its
pieces (its rows' halo, statistics of all ranks) is made here by `SPECIAL`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.graph.encoding import dtype_name, flat_results, resolve
from penstock.graph.step_graph import Operator, TensorView, map_views, views_in
from penstock.partitioner.axes import AxisRule, find_rule

NUM_RANKS = 2
# Sums of at most 64 products of numbers around 1, in another order.
TOLERANCE = {torch.float32: 2e-5, torch.int64: 0}


def floats(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.rand(shape, generator=generator) + 0.25


def indices(limit: int, *shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).mul(7).remainder(limit).reshape(shape)


@dataclass
class Case:
    """An operator's arguments, and the letters along which it must be possible to split it."""

    target: str
    args: tuple[Any, ...]
    letters: str
    kwargs: dict[str, Any] = field(default_factory=dict)


X, ROWS = floats(4, 6, 8), floats(4, 6, 1)
IMAGE, KERNEL = floats(4, 4, 8, 8), floats(6, 4, 3, 3)
CONVOLUTION = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
STRIDED = ((2, 2), (1, 1), (1, 1), False, (0, 0), 1)
GROUPED = ((1, 1), (1, 1), (1, 1), False, (0, 0), 4)
PATCHES = ((4, 4), (1, 1), (1, 1), False, (0, 0), 1)
Q, K = floats(2, 4, 6, 8), floats(2, 2, 6, 8)
LOGITS, CLASSES = floats(8, 6).log_softmax(-1), indices(6, 8)
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
ATTENDED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(Q, Q, Q)
SHARED = floats(2, 1, 6, 8)  # a key of all heads
ATTENDED_TO_SHARED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(Q, SHARED, SHARED)
CASES = [
    Case("mm.default", (floats(4, 6), floats(6, 8)), "mkn"),
    Case("addmm.default", (floats(8), floats(4, 6), floats(6, 8)), "mkn"),
    Case("addmm.default", (floats(4, 8), floats(4, 6), floats(6, 8)), "mkn"),
    Case("bmm.default", (floats(2, 4, 6), floats(2, 6, 8)), "bmkn"),
    Case("baddbmm.default", (floats(2, 4, 8), floats(2, 4, 6), floats(2, 6, 8)), "bmkn"),
    Case("mv.default", (floats(4, 6), floats(6)), "mk"),
    Case("dot.default", (floats(6), floats(6)), "k"),
    Case("convolution.default", (IMAGE, KERNEL, floats(6), *CONVOLUTION), "noih"),
    Case("convolution.default", (IMAGE, KERNEL, None, *STRIDED), "noih"),
    Case("convolution.default", (IMAGE, floats(4, 1, 3, 3), floats(4), *GROUPED), "n"),
    Case("convolution.default", (IMAGE, floats(6, 4, 4, 4), None, *PATCHES), "noi"),
    Case(
        "convolution_backward.default",
        (floats(4, 6, 8, 8), IMAGE, KERNEL, (6,), *CONVOLUTION, (True, True, True)),
        "noih",
    ),
    Case(
        "convolution_backward.default",
        (floats(4, 6, 4, 4), IMAGE, KERNEL, (6,), *STRIDED, (True, True, True)),
        "noih",
    ),
    Case("add.Tensor", (X, floats(8)), "abc"),
    Case("add.Tensor", (X, floats()), "abc"),
    Case("mul.Tensor", (X, floats()), "abc"),
    Case("div.Tensor", (floats(), X), "abc"),
    Case("div.Tensor_mode", (X, 2.0), "abc", {"rounding_mode": "floor"}),
    Case("mul.Tensor", (X, ROWS), "abc"),
    Case("mul_.Tensor", (X, 2.0), "abc"),
    Case("addcmul_.default", (X, X, X), "abc", {"value": 0.5}),
    Case("lerp_.Scalar", (X, X + 1, 0.5), "abc"),
    Case("where.self", (X > 0.5, X, floats(4, 1, 8)), "abc"),
    Case("gelu_backward.default", (X, X), "abc"),
    Case("clone.default", (X,), "abc"),
    Case("_to_copy.default", (X,), "abc", {"dtype": torch.float64}),
    Case("_to_copy.default", (X,), "abc", {"dtype": torch.int64}),
    Case("sum.dim_IntList", (X, [0]), "abc", {"dtype": torch.int64}),
    Case("sort.stable", (X,), "bc", {"stable": True, "dim": 0}),
    Case("argsort.stable", (X,), "ab", {"stable": True}),
    Case("_softmax.default", (X, -1, False), "ab"),
    Case("_log_softmax.default", (X, 1, False), "ac"),
    Case("_softmax_backward_data.default", (X, X, -1, torch.float32), "ab"),
    Case("cumsum.default", (X, 0), "bc"),
    Case("cat.default", ([X, X], -1), "ab"),
    Case("cat.default", ([X, X],), "bc"),
    Case("cat.default", ([floats(0), X], -2), "ac"),
    Case("stack.default", ([X, X], -2), "abc"),
    Case("stack.default", ([X, X],), "abc"),
    Case("slice_backward.default", (X, [4, 6, 16], 2, 0, 8, 1), "ab"),
    Case("select_backward.default", (X, [4, 3, 6, 8], 1, 2), "acd"),
    Case("sum.dim_IntList", (X, [0, 1], True), "abc"),
    Case("sum.default", (X,), "abc"),
    Case("mean.dim", (X, [-1], True), "abc"),
    Case("mean.default", (X,), "abc"),
    Case("native_layer_norm.default", (X, [8], floats(8), floats(8), 1e-5), "ab"),
    Case(
        "native_layer_norm_backward.default",
        (X, X, [8], ROWS, ROWS, floats(8), floats(8), [True, True, True]),
        "ab",
    ),
    Case("native_batch_norm.default", (IMAGE, *(floats(4),) * 4, True, 0.1, 1e-5), "ncab"),
    Case(
        "native_batch_norm_backward.default",
        (IMAGE, IMAGE, *(floats(4),) * 5, True, 1e-5, [True, True, True]),
        "ncab",
    ),
    Case("native_group_norm.default", (IMAGE, floats(4), floats(4), 4, 4, 64, 2, 1e-5), "n"),
    Case("native_group_norm.default", (IMAGE, None, None, 4, 4, 64, 2, 1e-5), "n"),
    Case(
        "native_group_norm_backward.default",
        (IMAGE, IMAGE, ROWS[:, :2, 0], ROWS[:, :2, 0], floats(4), 4, 4, 64, 2, [True, True, True]),
        "n",
    ),
    Case("max_pool2d_with_indices.default", (IMAGE, [2, 2]), "nc"),
    Case("max_pool2d_with_indices.default", (IMAGE[0], [2, 2]), "c"),
    Case("_adaptive_avg_pool2d.default", (IMAGE, [2, 2]), "nc"),
    Case("_adaptive_avg_pool2d.default", (IMAGE[0], [2, 2]), "c"),
    Case("embedding.default", (floats(8, 6), indices(8, 4, 2)), "vwab"),
    Case("embedding_dense_backward.default", (X, indices(6, 4, 6), 6, -1, False), "vwab"),
    Case("nll_loss_forward.default", (LOGITS, CLASSES, None, 1, -100), "n"),
    Case("nll_loss_forward.default", (LOGITS, CLASSES, None, 0, -100), "n"),
    Case("nll_loss_forward.default", (LOGITS[0], CLASSES[0], None, 1, -100), ""),
    Case(
        "nll_loss_backward.default",
        (floats(), LOGITS, CLASSES, None, 1, -100, torch.tensor(8.0)),
        "n",
    ),
    Case(f"{ATTENTION}.default", (Q, K, K, 0.0, True), "bh"),
    Case(f"{ATTENTION}_backward.default", (Q, Q, Q, Q, *ATTENDED, 0.0, False), "bh"),
    Case(
        f"{ATTENTION}_backward.default",
        (Q, Q, SHARED, SHARED, *ATTENDED_TO_SHARED, 0.0, False),
        "bh",
    ),
    Case("gather.default", (X, 2, indices(8, 4, 6, 2)), "ab"),
    Case("gather.default", (X, 0, indices(4, 2, 4, 8)), "c"),
    Case("index.Tensor", (X, [None, indices(6, 4, 2)]), "actu"),
    Case("index.Tensor", (X, [indices(4, 2), indices(6, 2)]), "ct"),
    Case("index_select.default", (X, 1, indices(6, 4)), "abc"),
    Case("constant_pad_nd.default", (X, [0, 1], 2.0), "ab"),
    Case("tril.default", (X,), "a"),
]


def make_operator(case: Case) -> tuple[Operator, list[Tensor]]:
    """The operator of a case, and its tensors by value."""
    tensors: list[Tensor] = []

    def view(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            shape, stride = tuple(value.shape), tuple(value.stride())
            return TensorView(len(tensors) - 1, dtype_name(value.dtype), shape, stride)
        return tuple(map(view, value)) if isinstance(value, list | tuple) else value

    target = f"aten.{case.target}"
    args = tuple(map(view, case.args))
    results = flat_results(resolve(target)(*_copied(case.args), **case.kwargs))
    outputs = tuple(view(each) if isinstance(each, Tensor) else None for each in results)
    names = [each.name for each in resolve(target)._schema.arguments if each.is_write]
    places = [i for i, each in enumerate(resolve(target)._schema.arguments) if each.name in names]
    mutates = ()
    if "batch_norm.default" in target:  # running statistics change, though the schema is silent
        places = [3, 4]
        mutates = tuple((args[place].value, 1000 + place) for place in places)
    operator = Operator(
        name="x", target=target, args=args, kwargs=case.kwargs, outputs=outputs, mutates=mutates
    )
    return operator, tensors


def _copied(args: Any) -> Any:
    if isinstance(args, Tensor):
        return args.clone()
    return [_copied(each) for each in args] if isinstance(args, list | tuple) else args


def piece(tensor: Tensor, labels: tuple[str, ...], letter: str, rank: int) -> Tensor:
    if letter not in labels:
        return tensor
    dim = labels.index(letter)
    return tensor.chunk(NUM_RANKS, dim)[rank].contiguous()


def run_rank(
    case: Case, operator: Operator, rule: AxisRule, tensors: list[Tensor], letter: str, rank: int
) -> list[Any]:
    """Results of one rank: its pieces in, its pieces or partial sums out."""
    pieces: dict[int, Tensor] = {}
    for index, operand in enumerate(rule.inputs):
        own = piece(tensors[operand.view.value], operand.labels, letter, rank)
        is_summed = any(letter in output.sums for output in rule.outputs)
        if rank and is_summed and index in rule.first_only:
            own = torch.zeros_like(own)
        pieces[operand.view.value] = own.clone()
    args = [_copied_back(map_views(lambda v: v, each), pieces) for each in operator.args]
    name = case.target.partition(".")[0]
    if name in ("slice_backward", "select_backward"):
        shape = list(operator.args[1])
        labels = rule.outputs[0].labels
        if letter in labels:
            shape[labels.index(letter)] //= NUM_RANKS
        args[1] = shape
    if "group_norm" in name:
        place = 5 if name.endswith("backward") else 3
        args[place] //= NUM_RANKS
    function = resolve(operator.target)
    special = SPECIAL.get((name, letter))
    results = flat_results(
        special(args, tensors, rank) if special else function(*args, **case.kwargs)
    )
    if operator.mutates:
        results += [args[3], args[4]]
    return results


def _copied_back(value: Any, pieces: dict[int, Tensor]) -> Any:
    if isinstance(value, TensorView):
        return pieces[value.value]
    return [_copied_back(each, pieces) for each in value] if isinstance(value, tuple) else value


def batch_norm(args: list[Any], tensors: list[Tensor], rank: int) -> list[Tensor]:
    """A rank of SyncBatchNorm: the statistics are those of the whole batch."""
    part, weight, bias, mean, variance, _, momentum, epsilon = args
    whole = tensors[0]
    dims = [0, 2, 3]
    center, spread = whole.mean(dims), whole.var(dims, unbiased=False)
    scale = (spread + epsilon).rsqrt()
    shape = (1, -1, 1, 1)
    result = (part - center.view(shape)) * (scale * weight).view(shape) + bias.view(shape)
    count = whole.numel() // whole.shape[1]
    mean.mul_(1 - momentum).add_(momentum * center).div_(NUM_RANKS)  # as partial sums
    variance.mul_(1 - momentum).add_(momentum * spread * count / (count - 1)).div_(NUM_RANKS)
    return [result, center / NUM_RANKS, scale / NUM_RANKS]


def batch_norm_backward(args: list[Any], tensors: list[Tensor], rank: int) -> list[Tensor]:
    """A rank's gradients, with the gradients of weight and bias of the whole batch."""
    grad, part, weight, _, _, mean, scale, *_ = args
    whole_grad, whole = tensors[0], tensors[1]
    dims, shape = [0, 2, 3], (1, -1, 1, 1)

    def normal(image: Tensor) -> Tensor:
        return (image - mean.view(shape)) * scale.view(shape)

    count = whole.numel() // whole.shape[1]
    total = (whole_grad * normal(whole)).sum(dims).view(shape) / count
    inner = grad - whole_grad.sum(dims).view(shape) / count - normal(part) * total
    of_image = inner * (weight * scale).view(shape)
    return [of_image, (grad * normal(part)).sum(dims), grad.sum(dims)]


def embedding(args: list[Any], tensors: list[Tensor], rank: int) -> Tensor:
    """A rank's rows of the table, and zeros for the others."""
    table, places = args
    local = places - rank * len(table)
    mine = (local >= 0) & (local < len(table))
    return table[local.clamp(0, len(table) - 1)] * mine.unsqueeze(-1)


def embedding_backward(args: list[Any], tensors: list[Tensor], rank: int) -> Tensor:
    grad, places, num_rows, *_ = args
    full = torch.ops.aten.embedding_dense_backward(grad, places, num_rows, -1, False)
    return full.chunk(NUM_RANKS)[rank]


def mean_loss(args: list[Any], tensors: list[Tensor], rank: int) -> list[Tensor]:
    """A rank's share of a mean over all ranks' classes."""
    if args[3] == 0:
        return list(torch.ops.aten.nll_loss_forward(*args))
    loss, weight = torch.ops.aten.nll_loss_forward(*args[:3], 2, args[4])
    return [loss / len(tensors[1]), torch.tensor(float(len(args[1]))) + 0 * weight]


def _with_halo(image: Tensor, rank: int, stride: int, kernel: int) -> Tensor:
    """A rank's rows of a padded image, with those that its windows reach into."""
    padded = torch.nn.functional.pad(image, (0, 0, 1, 1))
    rows = image.shape[2] // NUM_RANKS
    return padded[:, :, rank * rows : rank * rows + rows + kernel - stride].contiguous()


def convolution(args: list[Any], tensors: list[Tensor], rank: int) -> Tensor:
    stride = args[3][0]
    image = _with_halo(tensors[0], rank, stride, 3)
    return torch.ops.aten.convolution(image, *args[1:4], [0, 1], *args[5:])


def convolution_backward(args: list[Any], tensors: list[Tensor], rank: int) -> list[Tensor]:
    """Gradients of a rank's rows; those of its halo are added to its neighbour's."""
    stride, halo = args[4][0], 3 - args[4][0]
    rows = tensors[1].shape[2] // NUM_RANKS
    total = torch.zeros(*tensors[1].shape[:2], tensors[1].shape[2] + halo + 1, tensors[1].shape[3])
    own: list[Tensor] = []
    for each in range(NUM_RANKS):
        grad = tensors[0].chunk(NUM_RANKS, 2)[each].contiguous()
        image = _with_halo(tensors[1], each, stride, 3)
        parts = torch.ops.aten.convolution_backward(grad, image, *args[2:5], [0, 1], *args[6:])
        total[:, :, each * rows : each * rows + parts[0].shape[2]] += parts[0]
        if each == rank:
            own = list(parts)
    return [total[:, :, 1 + rank * rows : 1 + rank * rows + rows], *own[1:]]


SPECIAL: dict[tuple[str, str], Callable[[list[Any], list[Tensor], int], Any]] = {
    **{("native_batch_norm", letter): batch_norm for letter in "nab"},
    **{("native_batch_norm_backward", letter): batch_norm_backward for letter in "nab"},
    ("embedding", "v"): embedding,
    ("embedding_dense_backward", "v"): embedding_backward,
    ("nll_loss_forward", "n"): mean_loss,
    ("convolution", "h"): convolution,
    ("convolution_backward", "h"): convolution_backward,
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.target}-{case.letters}")
def test_pieces_make_the_whole(case: Case):
    operator, tensors = make_operator(case)
    rule = find_rule(operator)
    assert rule is not None
    operands = (*rule.inputs, *rule.outputs)
    letters = {each for operand in operands for each in operand.labels if each}
    assert letters == set(case.letters)
    args = [_copied_back(each, dict(enumerate(tensors))) for each in operator.args]
    args = _copied(args)
    whole = flat_results(resolve(operator.target)(*args, **case.kwargs))
    whole = [each for each in whole if isinstance(each, Tensor)]
    if operator.mutates:
        whole += [args[3], args[4]]
    for letter in sorted(letters):
        ranks = [run_rank(case, operator, rule, tensors, letter, rank) for rank in range(NUM_RANKS)]
        for index, (output, expected) in enumerate(zip(rule.outputs, whole, strict=True)):
            results = [rank[index] for rank in ranks]
            if letter in output.labels:
                made = torch.cat(results, output.labels.index(letter))
            elif letter in output.sums:
                made = torch.stack(results).sum(0)
                made = made / NUM_RANKS if rule.averages else made
            else:
                assert torch.equal(results[0], results[1])
                made = results[0]
            bound = TOLERANCE.get(expected.dtype, 1e-9)
            assert made.shape == expected.shape
            assert torch.allclose(made, expected, rtol=bound, atol=bound), (letter, index)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.target}-{case.letters}")
def test_linear_operators_run_on_partial_sums(case: Case):
    operator, tensors = make_operator(case)
    rule = find_rule(operator)
    assert rule is not None
    if not rule.is_linear:
        return
    function = resolve(operator.target)

    def run(scale: float) -> Tensor:
        parts = {view.value: tensors[view.value].clone() for view in views_in(operator.args)}
        for value in parts:
            noise = torch.sin(torch.arange(parts[value].numel())).view(parts[value].shape)
            parts[value] = (0.5 * parts[value] + scale * noise).to(parts[value].dtype)
        return function(*[_copied_back(each, parts) for each in operator.args], **case.kwargs)

    copies = dict(enumerate(_copied(tensors)))
    whole = function(*[_copied_back(each, copies) for each in operator.args], **case.kwargs)
    if case.target == "_to_copy.default":
        whole = whole.float()
    assert torch.allclose((run(1.0) + run(-1.0)).to(whole.dtype), whole, rtol=1e-5, atol=1e-5)


def test_operators_without_an_entry_have_no_rule():
    operator = Operator(name="x", target="aten.linalg_qr.default", outputs=(None,))
    assert find_rule(operator) is None
