"""Entries of the axis table: letters for the operators of captured steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from penstock.graph.encoding import EMPTY, FULL, OWN_TARGETS, resolve
from penstock.graph.step_graph import Operator, TensorView, views_in
from penstock.partitioner.axes._arguments import find_argument

Labels = tuple[str, ...]
"""A letter for each dimension; `""` where every rank needs all of it."""

WHOLE = ""


class LetterDraft(NamedTuple):
    """Letters by place of argument and by result, before views that are not named are filled in.

    Entries take operators with all arguments in the places of their schemas.
    """

    inputs: Mapping[int, Labels]
    outputs: Mapping[int, Labels]
    sums: Mapping[int, str] = {}
    halo: Mapping[int, tuple[tuple[str, int], ...]] = {}
    output_halo: tuple[tuple[str, int], ...] = ()  # of the first result
    first_only: frozenset[int] = frozenset()
    is_linear: bool = False
    averages: bool = False


def is_heavy(target: str) -> bool:
    """Return whether an operator's work is worth dividing at any price: a product."""
    return target.split(".")[1] in _HEAVY if "." in target else False


@functools.cache
def find_entry(target: str) -> tuple[str, Callable[[str, Operator], LetterDraft | None] | None]:
    if target in (EMPTY, FULL):
        return target, _elementwise
    if target in OWN_TARGETS:
        return target, _whole
    if not target.startswith("aten."):
        return target, None
    name = target.split(".")[1]
    name = name if name.startswith("_") and name in _TABLE else name.rstrip("_")
    if name in _TABLE:
        return name, _TABLE[name]
    is_pointwise = torch.Tag.pointwise in resolve(target).tags
    return name, _elementwise if is_pointwise or name in _COPIES else None


def _letters(num: int) -> Labels:
    return tuple("abcdefghij"[:num])


def _broadcast(view: Any, shape: tuple[int, ...], letters: Labels) -> Labels:
    """Return the letters of an operand that is broadcast to a shape."""
    if not isinstance(view, TensorView) or len(view.shape) > len(shape):
        return ()
    first = len(shape) - len(view.shape)
    sizes = zip(view.shape, shape[first:], letters[first:], strict=True)
    return tuple(letter if size == whole else WHOLE for size, whole, letter in sizes)


def _elementwise(name: str, operator: Operator) -> LetterDraft | None:
    """One result element from the elements at its place."""
    view = next((each for each in operator.outputs if each is not None), None)
    if view is None:
        return None
    letters = _letters(len(view.shape))
    inputs = {
        index: _broadcast(each, view.shape, letters)
        for index, each in enumerate(operator.args)
        if isinstance(each, TensorView)
    }
    if any(_is_list_of_views(each) for each in operator.args):
        return None
    outputs = {
        index: letters
        for index, each in enumerate(operator.outputs)
        if each is not None and each.shape == view.shape
    }
    return LetterDraft(inputs, outputs, is_linear=_is_linear(name, operator))


def _is_linear(name: str, operator: Operator) -> bool:
    """Return whether the sum of results is the result of the sum of all tensor operands."""
    num_tensors = sum(isinstance(each, TensorView) for each in operator.args)
    if name in ("add", "sub"):
        return num_tensors == 2
    is_scaled = name in ("mul", "div") and find_argument(operator, "rounding_mode") is None
    is_first = num_tensors == 1 and isinstance(operator.args[0], TensorView)
    return is_first and (is_scaled or name in ("neg", "clone", "_to_copy"))


def _is_list_of_views(value: Any) -> bool:
    is_list = isinstance(value, tuple) and not isinstance(value, TensorView)
    return is_list and any(isinstance(each, TensorView) for each in value)


def _whole(name: str, operator: Operator) -> LetterDraft:
    """Operators that every rank runs alike: small tensors of fixed content."""
    return LetterDraft({}, {})


def _product(spec: str) -> Callable[[str, Operator], LetterDraft]:
    """Return the entry of an einsum, with an operand before it that is added to the result."""
    operands, result = spec.split("->")
    factors = operands.split(",")

    def make(name: str, operator: Operator) -> LetterDraft:
        first = len([*views_in(operator.args)]) - len(factors)
        inputs = {first + index: tuple(each) for index, each in enumerate(factors)}
        for index in range(first):
            shape = operator.outputs[0].shape  # pyright: ignore[reportOptionalMemberAccess]
            inputs[index] = _broadcast(operator.args[index], shape, tuple(result))
        summed = "".join(sorted(set("".join(factors)) - set(result)))
        return LetterDraft(
            inputs, {0: tuple(result)}, sums={0: summed}, first_only=frozenset(range(first))
        )

    return make


def _rowwise(name: str, operator: Operator) -> LetterDraft | None:
    """Operators along the dimensions that an argument names."""
    views = [*views_in(operator.args)]
    dim = find_argument(operator, "dim", "dims")
    dims = dim if isinstance(dim, tuple) else (dim,)
    if not views or not all(isinstance(each, int) for each in dims):
        return None
    num = max(len(each.shape) for each in views)
    along = {each % num for each in dims} if num else set()
    letters = tuple(WHOLE if i in along else _letters(num)[i] for i in range(num))
    same = {
        index: letters
        for index, each in enumerate(operator.args)
        if (isinstance(each, TensorView) and len(each.shape) == num) or _is_list_of_views(each)
    }
    results = {
        index: letters
        for index, each in enumerate(operator.outputs)
        if each is not None and len(each.shape) == num
    }
    return LetterDraft(same, results, is_linear=name in ("cat", "slice_backward"))


def _stack(name: str, operator: Operator) -> LetterDraft | None:
    """Tensors side by side along a dimension of their own."""
    result = operator.outputs[0]
    if result is None:
        return None
    num = len(result.shape)
    place = operator.args[1] % num
    letters = _letters(num - 1)
    labels = (*letters[:place], WHOLE, *letters[place:])
    return LetterDraft({0: letters}, {0: labels}, is_linear=True)


def _group_norm(name: str, operator: Operator) -> LetterDraft:
    """Norms of groups of channels of each image apart."""

    def samples(view: TensorView) -> Labels:
        return ("n", *(WHOLE,) * (len(view.shape) - 1))

    num_images = 4 if name.endswith("backward") else 1  # the other operands are of channels
    inputs = {
        index: samples(each)
        for index, each in enumerate(operator.args[:num_images])
        if isinstance(each, TensorView)
    }
    if num_images > 1:
        first = operator.outputs[0]
        outputs = {} if first is None else {0: samples(first)}
        return LetterDraft(inputs, outputs, sums={1: "n", 2: "n"})
    made = {index: samples(each) for index, each in enumerate(operator.outputs) if each is not None}
    return LetterDraft(inputs, made)


def _select_backward(name: str, operator: Operator) -> LetterDraft | None:
    """A gradient that becomes one index of a larger tensor of zeros."""
    grad, result, dim = operator.args[0], operator.outputs[0], operator.args[2]
    if result is None:
        return None
    num = len(result.shape)
    letters = [*_letters(num)]
    letters[dim % num] = WHOLE
    rest = tuple(each for index, each in enumerate(letters) if index != dim % num)
    inputs = {0: rest} if len(grad.shape) == num - 1 else {}
    return LetterDraft(inputs, {0: tuple(letters)}, is_linear=True)


def _reduction(name: str, operator: Operator) -> LetterDraft | None:
    """Sums and means: over letters that the result lacks."""
    view, result = operator.args[0], operator.outputs[0]
    if result is None:
        return None
    num = len(view.shape)
    dims = find_argument(operator, "dim")
    dims = (dims,) if isinstance(dims, int) else dims
    along = {each % num for each in dims} if isinstance(dims, tuple) and dims else set(range(num))
    letters = _letters(num)
    kept = tuple(each for index, each in enumerate(letters) if index not in along)
    if len(result.shape) == num and len(kept) < num:  # keepdim
        kept = tuple(WHOLE if index in along else each for index, each in enumerate(letters))
    summed = "".join(letters[index] for index in along)
    return LetterDraft(
        {0: letters}, {0: kept}, sums={0: summed}, is_linear=True, averages=name == "mean"
    )


def _layer_norm(name: str, operator: Operator) -> LetterDraft | None:
    """Norms over the last dimensions, given by their sizes."""
    backward = name.endswith("backward")
    first = operator.args[0]
    position = next((i for i, each in enumerate(operator.args) if _is_shape(each)), None)
    if position is None:
        return None
    num = len(first.shape)
    leading = num - len(operator.args[position])
    rows = _letters(leading)
    whole = rows + (WHOLE,) * (num - leading)
    inputs = {
        index: whole
        for index, each in enumerate(operator.args)
        if isinstance(each, TensorView) and len(each.shape) == num
    }
    if not backward:
        return LetterDraft(inputs, {0: whole, 1: whole, 2: whole})
    summed = "".join(rows)
    return LetterDraft(inputs, {0: whole}, sums={1: summed, 2: summed})


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(type(each) is int for each in value)


def _batch_norm(name: str, operator: Operator) -> LetterDraft:
    """Norms of channels over everything else: ranks add up their statistics.

    So a norm whose batch is split has the statistics of the whole batch, as SyncBatchNorm.
    """
    num = len(operator.args[0].shape)
    letters = ("n", "c", *"abd"[: num - 2])
    inputs = {
        index: letters if len(each.shape) == num else ("c",)
        for index, each in enumerate(operator.args)
        if isinstance(each, TensorView)
    }
    summed = "".join(letters[:1] + letters[2:])
    results: dict[int, Labels] = dict.fromkeys(range(1, 5), ("c",))
    return LetterDraft(inputs, {0: letters, **results}, sums=dict.fromkeys(range(1, 5), summed))


def _images(name: str, operator: Operator) -> LetterDraft:
    """Operators on each image and channel apart: pooling, resizing; of one image too."""

    def label(view: TensorView) -> Labels:
        return (*("n", "c")[4 - len(view.shape) :], WHOLE, WHOLE)

    views = {i: each for i, each in enumerate(operator.args) if isinstance(each, TensorView)}
    made = {i: each for i, each in enumerate(operator.outputs) if each is not None}
    return LetterDraft(
        {index: label(each) for index, each in views.items()},
        {index: label(each) for index, each in made.items()},
    )


def _rows_of_image(operator: Operator, image: TensorView, places: TensorView, first: int) -> int:
    """Return the halo of a convolution's rows; -1 if they cannot be split.

    Row r of the result reads rows from r * stride - padding to before that + reach, so a rank needs
    `padding` rows before its own and `reach - stride - padding` after them.
    """
    stride, padding, dilation = operator.args[first : first + 3]
    weight = operator.args[first - 2 if first == 3 else 2]
    if operator.args[first + 3] or operator.args[first + 5] != 1 or len(image.shape) != 4:
        return -1
    reach = dilation[0] * (weight.shape[2] - 1) + 1
    if image.shape[2] != places.shape[2] * stride[0] or reach - stride[0] > 2 * padding[0]:
        return -1
    if padding[0] == 0:
        return max(0, reach - stride[0])
    return reach - stride[0] if reach - stride[0] >= padding[0] else -1


def _convolution(name: str, operator: Operator) -> LetterDraft | None:
    """Products over channels, at each place; rows of the image overlap by a halo."""
    image, weight, result = operator.args[0], operator.args[1], operator.outputs[0]
    if result is None:
        return None
    spatial = len(image.shape) - 2
    halo = _rows_of_image(operator, image, result, 3)
    places = ("h" if halo >= 0 else WHOLE,) + (WHOLE,) * (spatial - 1)
    if operator.args[6] or operator.args[8] != 1:  # transposed; groups
        return LetterDraft(
            {0: ("n",) + (WHOLE,) * (spatial + 1)}, {0: ("n",) + (WHOLE,) * (spatial + 1)}
        )
    kernel = (WHOLE,) * (len(weight.shape) - 2)
    return LetterDraft(
        {0: ("n", "i", *places), 1: ("o", "i", *kernel), 2: ("o",)},
        {0: ("n", "o", *places)},
        sums={0: "i"},
        halo={0: (("h", halo),)} if halo > 0 else {},
        first_only=frozenset({2}),
    )


def _convolution_backward(name: str, operator: Operator) -> LetterDraft:
    """Gradients of image, weight and bias: the first sums over o, the others over n and places."""
    grad, image, weight = operator.args[:3]
    spatial = len(image.shape) - 2
    halo = _rows_of_image(operator, image, grad, 4)
    if operator.args[7] or operator.args[9] != 1:
        labels = ("n",) + (WHOLE,) * (spatial + 1)
        return LetterDraft({0: labels, 1: labels}, {0: labels}, sums={1: "n", 2: "n"})
    places = ("h" if halo >= 0 else WHOLE,) + (WHOLE,) * (spatial - 1)
    kernel = (WHOLE,) * (len(weight.shape) - 2)
    summed = "nh" if halo >= 0 else "n"
    return LetterDraft(
        {0: ("n", "o", *places), 1: ("n", "i", *places), 2: ("o", "i", *kernel)},
        {0: ("n", "i", *places), 1: ("o", "i", *kernel), 2: ("o",)},
        sums={0: "o", 1: summed, 2: summed},
        halo={1: (("h", halo),)} if halo > 0 else {},
        output_halo=(("h", halo),) if halo > 0 else (),
    )


def _embedding(name: str, operator: Operator) -> LetterDraft:
    """Rows by index: v (rows of the table) is summed over, as each rank has only its own rows."""
    places = _letters(len(operator.args[1].shape))
    return LetterDraft({0: ("v", "w"), 1: places}, {0: (*places, "w")}, sums={0: "v"})


def _embedding_backward(name: str, operator: Operator) -> LetterDraft:
    places = _letters(len(operator.args[1].shape))
    return LetterDraft({0: (*places, "w"), 1: places}, {0: ("v", "w")}, sums={0: "".join(places)})


def _loss(name: str, operator: Operator) -> LetterDraft:
    """Losses of classes: the mean is over all ranks' weights."""
    if len(operator.args[0].shape) == 1:  # one sample: its dimension is of classes
        return LetterDraft({}, {})
    labels = ("n", WHOLE)
    kept: dict[int, Labels] = {0: ("n",)} if operator.args[3] == 0 else {}
    return LetterDraft({0: labels, 1: ("n",)}, kept, sums={0: "" if kept else "n", 1: "n"})


def _loss_backward(name: str, operator: Operator) -> LetterDraft:
    if len(operator.args[1].shape) == 1:
        return LetterDraft({}, {})
    labels = ("n", WHOLE)
    grad: dict[int, Labels] = {0: ("n",)} if operator.args[0].shape else {}
    return LetterDraft({**grad, 1: labels, 2: ("n",)}, {0: labels})


def _attention(name: str, operator: Operator) -> LetterDraft:
    """Attention of samples (b) and heads (h) apart."""

    def label(view: TensorView) -> Labels:
        return ("b", "h")[: len(view.shape)] + (WHOLE,) * (len(view.shape) - 2)

    inputs = {
        index: label(each)
        for index, each in enumerate(operator.args)
        if isinstance(each, TensorView) and len(each.shape) > 2
    }
    results = {
        index: label(each)
        for index, each in enumerate(operator.outputs)
        if each is not None and len(each.shape) > 2
    }
    places = find_argument(operator, "query").shape[:2]
    bias = find_argument(operator, "attn_mask", "attn_bias")
    if isinstance(bias, TensorView):  # broadcast to samples and heads, queries and keys
        place = next(i for i, each in enumerate(operator.args) if each is bias)
        whole = (*places, *bias.shape[-2:])
        inputs[place] = _broadcast(bias, whole, ("b", "h", WHOLE, WHOLE))
    # A key that all heads of queries share: each rank has the gradient of its own heads.
    sums = {
        index: "".join(
            letter
            for letter, size, whole in zip("bh", each.shape, places, strict=False)
            if size == 1 < whole
        )
        for index, each in enumerate(operator.outputs)
        if each is not None and index in results and name.endswith("backward")
    }
    return LetterDraft(inputs, results, sums=sums)


def _gather(name: str, operator: Operator) -> LetterDraft | None:
    """One element of a row for each index: the other dimensions go together."""
    view, dim, index = operator.args[:3]
    num = len(view.shape)
    if not num or len(index.shape) != num:
        return None
    sizes = zip(_letters(num), view.shape, index.shape, strict=True)
    letters = [letter if size == other else WHOLE for letter, size, other in sizes]
    letters[dim % num] = WHOLE
    return LetterDraft({0: tuple(letters), 2: tuple(letters)}, {0: tuple(letters)})


def _index_select(name: str, operator: Operator) -> LetterDraft:
    view, dim = operator.args[:2]
    letters = [*_letters(len(view.shape))]
    source = letters.copy()
    source[dim % len(letters)] = WHOLE
    place = letters[dim % len(letters)]
    return LetterDraft({0: tuple(source), 2: (place,)}, {0: tuple(letters)})


def _index(name: str, operator: Operator) -> LetterDraft | None:
    """Elements by index: dimensions without an index go together, places of indices too."""
    view, result = operator.args[0], operator.outputs[0]
    indices = operator.args[1]
    indexed = [dim for dim, each in enumerate(indices) if each is not None]
    shapes = {indices[dim].shape for dim in indexed}
    first, last = indexed[0], indexed[-1] + 1
    if result is None or len(shapes) != 1 or len(indexed) != last - first:
        return None
    places = tuple("tuvwxyz"[: len(shapes.pop())])
    letters = _letters(len(view.shape))
    before, after = letters[:first], letters[last:]
    source = (*before, *(WHOLE,) * (last - first), *after)
    return LetterDraft({0: source, 1: places}, {0: (*before, *places, *after)})


def _pad(name: str, operator: Operator) -> LetterDraft:
    view, pads = operator.args[:2]
    num = len(view.shape)
    padded = {num - 1 - index // 2 for index, each in enumerate(pads) if each}
    letters = tuple(WHOLE if i in padded else each for i, each in enumerate(_letters(num)))
    return LetterDraft({0: letters}, {0: letters})


def _leading(name: str, operator: Operator) -> LetterDraft:
    """Operators on the last two dimensions: those before them go apart."""
    num = len(operator.args[0].shape)
    letters = _letters(max(0, num - 2)) + (WHOLE,) * min(2, num)
    return LetterDraft({0: letters}, {0: letters}, is_linear=True)


_TABLE: Mapping[str, Callable[[str, Operator], LetterDraft | None]] = {
    **{"mm": _product("mk,kn->mn"), "addmm": _product("mk,kn->mn"), "mv": _product("mk,k->m")},
    **{"bmm": _product("bmk,bkn->bmn"), "baddbmm": _product("bmk,bkn->bmn")},
    "dot": _product("k,k->"),
    **{"convolution": _convolution, "convolution_backward": _convolution_backward},
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax"), _rowwise),
    **dict.fromkeys(("cumsum", "cumprod", "sort", "argsort", "flip"), _rowwise),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _rowwise),
    **dict.fromkeys(("slice_backward",), _rowwise),
    **{"cat": _rowwise, "stack": _stack},
    "topk": _rowwise,
    "select_backward": _select_backward,
    **dict.fromkeys(("sum", "mean"), _reduction),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), _layer_norm),
    **dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), _layer_norm),
    **dict.fromkeys(("native_batch_norm", "native_batch_norm_backward"), _batch_norm),
    **dict.fromkeys(("native_group_norm", "native_group_norm_backward"), _group_norm),
    **dict.fromkeys(("max_pool2d_with_indices", "max_pool2d_with_indices_backward"), _images),
    **dict.fromkeys(("avg_pool2d", "avg_pool2d_backward"), _images),
    **dict.fromkeys(("_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward"), _images),
    **dict.fromkeys(("upsample_nearest2d", "upsample_bilinear2d"), _images),
    **{"embedding": _embedding, "embedding_dense_backward": _embedding_backward},
    **{"nll_loss_forward": _loss, "nll_loss_backward": _loss_backward},
    **{
        f"_scaled_dot_product_{kind}{end}": _attention
        for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention")
        for end in ("", "_backward")
    },
    **{"gather": _gather, "index_select": _index_select, "constant_pad_nd": _pad},
    "index": _index,
    **dict.fromkeys(("tril", "triu"), _leading),
    **dict.fromkeys(("arange", "scalar_tensor", "lift_fresh_copy", "eye"), _whole),
}
_COPIES = {
    *("_to_copy", "clone", "copy", "fill", "zero", "bernoulli", "uniform", "normal"),
    *("zeros_like", "ones_like", "full_like", "empty_like", "zeros", "ones", "full", "empty"),
    *("masked_fill", "native_dropout_backward"),
}
_HEAVY = {
    *("mm", "addmm", "bmm", "baddbmm", "mv", "convolution", "convolution_backward"),
    *(name for name in _TABLE if name.startswith("_scaled_dot_product")),
}
