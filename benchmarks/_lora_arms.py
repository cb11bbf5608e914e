"""Arms of a LoRA layer: one step forward and backward, on operands that all arms share.

The arms: PEFT's own layer, eager and under `torch.compile`; the form that adds the product of rank
r into the layer's output and keeps the masked input (what Unsloth does, on torch's library);
Unsloth's own function where it imports; `penstock.lora.linear`; and the frozen product alone, which
is the least that a step can take.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from penstock.lora import Adapter, linear

PEFT = "PEFT"
COMPILED = "PEFT, torch.compile"
ADD_INTO = "add into output"
UNSLOTH = "Unsloth"
OURS = "penstock"
BASE = "base only"
ARMS = (PEFT, COMPILED, ADD_INTO, OURS, BASE)
FORWARD = "forward, beside the base product"
"""Arm of the part that counts bytes."""
SCALING = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A layer with one adapter, of as many outputs as inputs."""

    rows: int
    width: int
    rank: int
    dropout: float

    def __str__(self) -> str:
        return f"M {self.rows}, K=N {self.width}, r {self.rank}, dropout {self.dropout:g}"

    @property
    def saved_elements(self) -> int:
        """Elements of x and of the product of rank r: the most that autograd need keep."""
        return self.rows * (self.width + self.rank)


@dataclasses.dataclass(frozen=True)
class Operands:
    """What all arms of a shape compute with; x and the adapter's matrices want gradients."""

    x: torch.Tensor
    weight: torch.Tensor
    down: torch.nn.Parameter
    up: torch.nn.Parameter
    dy: torch.Tensor

    @classmethod
    def draw(cls, shape: Shape, device: str = "cpu") -> Operands:
        """Draw the operands of a shape: fp32 on the CPU, bf16 on a GPU."""
        generator = torch.Generator().manual_seed(0)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16

        def normal(rows: int, columns: int, scale: float) -> torch.Tensor:
            values = torch.randn(rows, columns, generator=generator).mul_(scale)
            return values.to(device, dtype)

        of_width, of_rank = shape.width**-0.5, shape.rank**-0.5
        return cls(
            x=normal(shape.rows, shape.width, 1.0).requires_grad_(),
            weight=normal(shape.width, shape.width, of_width),
            down=torch.nn.Parameter(normal(shape.rank, shape.width, of_width)),
            up=torch.nn.Parameter(normal(shape.width, shape.rank, of_rank)),
            dy=normal(shape.rows, shape.width, 1.0),
        )

    @property
    def leaves(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Operands that get gradients."""
        return self.x, self.down, self.up


class LayerStep:
    """A step of one arm: forward, and backward from a given gradient.

    Args:
        forward: Returns the layer's output.
        operands: The operands that `forward` uses.
        device: Where it runs.
    """

    def __init__(
        self, forward: Callable[[], torch.Tensor], operands: Operands, device: str = "cpu"
    ) -> None:
        self.forward, self.operands, self.device = forward, operands, device

    def __call__(self) -> torch.Tensor:
        """Return the output; the gradients are left in the leaves."""
        for leaf in self.operands.leaves:
            leaf.grad = None
        y = self.forward()
        y.backward(self.operands.dy)
        return y

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self.device != "cpu":
            torch.cuda.synchronize()

    def saved_bytes(self) -> tuple[int, int]:
        """Return the bytes of storages that autograd keeps, those of weights left out.

        The first number is of activations and masks, the second of integers of 64 bits: seeds, and
        numbers of rows.
        """
        operands = self.operands
        weights = {
            each.untyped_storage().data_ptr() for each in (operands.weight, *operands.leaves[1:])
        }
        activations: dict[int, int] = {}
        integers: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kind = integers if tensor.dtype == torch.int64 else activations
                kind[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = self.forward()
        y.backward(operands.dy)  # nothing is freed before, so no address stands for two storages
        return sum(activations.values()), sum(integers.values())


class _AddInto(torch.autograd.Function):
    """A layer that adds its adapter's product into its output and keeps the masked input."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, down: Any, up: Any, dropout: float) -> Any:
        masked, mask = torch.native_dropout(x, dropout, True) if dropout else (x, None)
        y = torch.mm(x, weight.t())
        y.addmm_(torch.mm(masked, down.t()), up.t(), alpha=SCALING)
        ctx.save_for_backward(masked, mask, weight, down, up)
        ctx.dropout = dropout
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (dy,) = gradients
        masked, mask, weight, down, up = ctx.saved_tensors
        dhidden = torch.mm(dy, up).mul_(SCALING)
        ddown = torch.mm(dhidden.t(), masked)
        dup = torch.mm(dy.t(), torch.mm(masked, down.t())).mul_(SCALING)
        dx = torch.mm(dy, weight)
        if mask is None:
            dx.addmm_(dhidden, down)
        else:
            dx.add_(torch.mm(dhidden, down).mul_(mask).div_(1 - ctx.dropout))
        return dx, None, ddown, dup, None


def make_peft_layer(shape: Shape, operands: Operands) -> torch.nn.Module:
    """Return PEFT's layer on the operands, in training mode."""
    from peft import LoraConfig
    from peft.tuners.lora import Linear

    with torch.device("meta"):
        base = torch.nn.Linear(shape.width, shape.width, bias=False)
    base.weight = torch.nn.Parameter(operands.weight, requires_grad=False)
    alpha = round(SCALING * shape.rank)
    config = LoraConfig(r=shape.rank, lora_alpha=alpha, lora_dropout=shape.dropout)
    layer: Any = Linear(base, "default", config=config, r=shape.rank, lora_alpha=alpha)
    layer.lora_A["default"].weight = operands.down
    layer.lora_B["default"].weight = operands.up
    return layer.train()


def make_step(name: str, shape: Shape, operands: Operands, device: str = "cpu") -> LayerStep:
    """Return the step of an arm of `ARMS`, or of Unsloth."""
    x, weight, down, up = operands.x, operands.weight, operands.down, operands.up
    if name in (PEFT, COMPILED):
        layer: Any = make_peft_layer(shape, operands)
        if name == COMPILED:
            layer = torch.compile(layer, dynamic=False)
        return LayerStep(lambda: layer(x), operands, device)
    if name == ADD_INTO:
        return LayerStep(
            lambda: _AddInto.apply(x, weight, down, up, shape.dropout), operands, device
        )
    if name == OURS:
        seeds = itertools.count(1)

        def call() -> torch.Tensor:  # an adapter a call, as a layer of a model makes it
            adapter = Adapter(down, up, SCALING, shape.dropout)
            return linear(x, weight, None, [adapter], seed=next(seeds))

        return LayerStep(call, operands, device)
    if name == BASE:
        return LayerStep(lambda: functional.linear(x, weight), operands, device)
    if name == UNSLOTH:
        return LayerStep(_unsloth_call(operands), operands, device)
    raise ValueError(f"name is {name!r}; accepted are {(*ARMS, UNSLOTH)}")


def _unsloth_call(operands: Operands) -> Callable[[], torch.Tensor]:
    from unsloth.kernels.fast_lora import LoRA_W  # type: ignore[import]

    x, weight, down, up = operands.x, operands.weight, operands.down, operands.up
    return lambda: LoRA_W.apply(x.unsqueeze(0), weight, None, down, up, SCALING).squeeze(0)


def reason_against(name: str, shape: Shape, device: str) -> str | None:
    """Return why an arm does not run on a shape here; None where it should."""
    if name == UNSLOTH:
        if device == "cpu":
            return "Unsloth needs a GPU"
        if shape.dropout:
            return "Unsloth's functions have no dropout"
        if importlib.util.find_spec("unsloth") is None:
            return "Unsloth is not installed"
    return None
