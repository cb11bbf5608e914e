"""Small training steps, written down operator by operator, without torch."""

from __future__ import annotations

import random
from itertools import pairwise
from math import prod

from penstock.graph import Kind, Operator, Phase, StepGraph, Storage, TensorView


class StepBuilder:
    """A step while it is written down; every value is a float32 tensor of its own storage."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.storage_of_value: list[int] = []
        self.operators: list[Operator] = []
        self.views: list[TensorView] = []

    def value(self, name: str, shape: tuple[int, ...], kind: Kind, *, initial: bool) -> TensorView:
        index = len(self.storage_of_value)
        stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
        self.storage_of_value.append(len(self.storages))
        self.storages.append(
            Storage(
                name=name,
                num_bytes=4 * prod(shape),
                kind=kind,
                initial=index if initial else None,
                final=index if initial and kind is not Kind.INPUT else None,
            )
        )
        view = TensorView(index, "float32", shape, stride)
        self.views.append(view)
        return view

    def call(
        self,
        target: str,
        *args: TensorView | float,
        shape: tuple[int, ...],
        kind: Kind = Kind.ACTIVATION,
        phase: Phase = Phase.FORWARD,
        **settings: object,
    ) -> TensorView:
        name = f"{target.split('.')[1]}_{len(self.operators)}"
        made = self.value(name, shape, kind, initial=False)
        views = [each for each in args if isinstance(each, TensorView)]
        self.operators.append(
            Operator(
                name=name,
                target=target,
                args=(*args, *settings.values()),
                outputs=(made,),
                reads=tuple(dict.fromkeys(view.value for view in views)),
                creates=(made.value,),
                phase=phase,
                bytes_read=sum(4 * prod(view.shape) for view in views),
                bytes_written=4 * prod(shape),
            )
        )
        return made

    def update(self, weight: TensorView, grad: TensorView) -> None:
        """Subtract a gradient from its parameter."""
        new = len(self.storage_of_value)
        storage = self.storage_of_value[weight.value]
        self.storage_of_value.append(storage)
        old = self.storages[storage]
        self.storages[storage] = Storage(
            name=old.name, num_bytes=old.num_bytes, kind=old.kind, initial=old.initial, final=new
        )
        made = weight._replace(value=new)
        self.operators.append(
            Operator(
                name=f"update_{old.name}",
                target="aten.add_.Tensor",
                args=(weight, grad),
                kwargs={"alpha": -0.1},
                outputs=(made,),
                reads=(grad.value,),
                mutates=((weight.value, new),),
                phase=Phase.OPTIMIZER,
                bytes_read=8 * prod(weight.shape),
                bytes_written=4 * prod(weight.shape),
            )
        )

    def graph(self) -> StepGraph:
        return StepGraph(
            storages=tuple(self.storages),
            storage_of_value=tuple(self.storage_of_value),
            operators=tuple(self.operators),
        )


def transpose(view: TensorView) -> TensorView:
    return view._replace(shape=view.shape[::-1], stride=view.stride[::-1])


def make_network(rows: int, widths: list[int], residual: frozenset[int] = frozenset()) -> StepGraph:
    """A chain of products with ReLU between them, its backward pass and its update.

    Layers of `residual` add their input to their result; their widths must be equal.
    """
    builder = StepBuilder()
    x = builder.value("batch", (rows, widths[0]), Kind.INPUT, initial=True)
    pairs = list(pairwise(widths))
    weights = [
        builder.value(f"weight{i}", pair, Kind.PARAMETER, initial=True)
        for i, pair in enumerate(pairs)
    ]
    inputs, sums = [], []
    for i, weight in enumerate(weights):
        inputs.append(x)
        product = builder.call("aten.mm.default", x, weight, shape=(rows, widths[i + 1]))
        sums.append(product)
        out = builder.call("aten.relu.default", product, shape=product.shape)
        if i in residual:
            out = builder.call("aten.add.Tensor", out, x, shape=out.shape)
        x = out
    back = {"phase": Phase.BACKWARD}
    grad = builder.call("aten.mul.Scalar", x, 2.0, shape=x.shape, **back)
    updates = []
    for i in reversed(range(len(weights))):
        rest = grad
        grad = builder.call(
            "aten.threshold_backward.default", grad, sums[i], 0, shape=grad.shape, **back
        )
        shape = weights[i].shape
        of_weight = builder.call(
            "aten.mm.default", transpose(inputs[i]), grad, shape=shape, kind=Kind.GRADIENT, **back
        )
        updates.append((weights[i], of_weight))
        if i:
            weight = transpose(weights[i])
            grad = builder.call("aten.mm.default", grad, weight, shape=(rows, shape[0]), **back)
            if i in residual:
                grad = builder.call("aten.add.Tensor", grad, rest, shape=grad.shape, **back)
    for weight, of_weight in updates:
        builder.update(weight, of_weight)
    return builder.graph()


def random_network(seed: int) -> StepGraph:
    """A network of one to four layers with few or many rows."""
    rng = random.Random(seed)
    num = rng.randint(1, 4)
    widths = [rng.choice((12, 24, 48, 96)) for _ in range(num + 1)]
    residual = set()
    for i in range(1, num):
        if rng.random() < 0.4:
            widths[i + 1] = widths[i]
            residual.add(i)
    return make_network(rng.choice((6, 24, 96)), widths, frozenset(residual))
