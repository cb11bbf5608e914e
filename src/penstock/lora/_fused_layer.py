"""PEFT's LoRA layer with `penstock.lora.linear` in its forward pass.

A layer becomes fused by its class alone: it keeps its parameters, submodules and state, so that
whatever PEFT does with it goes on. Each call looks at what it would skip: a submodule that was
replaced or has hooks, or a variant of LoRA, is called as PEFT calls it.

Only `_fuse.py` imports this file, when there is a model of PEFT.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.lora.layer import VARIANT_KWARG_KEYS, Linear
from peft.tuners.lora.torchao import TorchaoLoraLinear
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from penstock.compat.autograd import is_transformed
from penstock.compat.dispatch import current_modes
from penstock.lora._adapters import Adapter, AdapterRows, has_strides
from penstock.lora._linear import add, linear
from penstock.lora._products import is_autocasting
from penstock.lora._quantized import PLAIN, can_split_rows, multiply_by_rows
from penstock.lora._settings import (
    AdapterNames,
    Settings,
    find_settings,
    find_settings_uncompiled,
    note_change,
    note_seeds,
)

logger = logging.getLogger(__name__)

_FEW_ELEMENTS = 1 << 14  # of an input, such as one token of each sample
_SETTINGS = ("_active_adapter", "_disable_adapters")
_PARTS = ("lora_A", "lora_B", "lora_dropout")
_PART_TYPES = ((nn.Linear,), (nn.Linear,), (nn.Dropout, nn.Identity))
_RANK_FACTOR = 0x9E3779B97F4A7C15 - 2**64  # odd, so that ranks differ in many bits; signed


# What a fused layer is beside PEFT's class of its own, whose methods `super()` finds.
_Stock = Linear if TYPE_CHECKING else object


class FusedLayer(_Stock):
    """Forward pass of a layer of PEFT's with the adapters added by `penstock.lora`.

    Attributes:
        penstock_takes_names: Whether the model was called with `adapter_names`.
    """

    penstock_takes_names = False

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; settings that a recomputation needs later are noted."""
        if name not in _SETTINGS or torch.compiler.is_compiling():
            super().__setattr__(name, value)
            return
        before = self.current_settings()
        super().__setattr__(name, value)
        note_change(self, before, self.current_settings())

    def current_settings(self, names: AdapterNames | None = None) -> Settings:
        """Return the settings of now."""
        return Settings(names, tuple(self.active_adapters), self.disable_adapters)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the layer's output with the adapters of its rows added."""
        # Compiled code need not look for settings of earlier passes, until there are names.
        is_compiling = torch.compiler.is_compiling()
        if kwargs.get("adapter_names") is None and (self.penstock_takes_names or not is_compiling):
            find = find_settings_uncompiled if is_compiling else find_settings
            settings = find(self, self.current_settings())
            if settings is not None:
                return self._forward_with(settings, x, *args, **kwargs)
        return self._add_adapters(x, *args, **kwargs)

    def _forward_with(self, settings: Settings, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Call the layer with the settings of an earlier pass."""
        now = {name: getattr(self, name) for name in _SETTINGS}
        then: Any = (list(settings.active), settings.is_disabled)
        try:
            for name, value in zip(_SETTINGS, then, strict=True):
                super().__setattr__(name, value)
            if settings.names is not None:
                kwargs = {**kwargs, "adapter_names": settings.names}
            return self._add_adapters(x, *args, **kwargs)
        finally:
            for name, value in now.items():
                super().__setattr__(name, value)

    def _add_adapters(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        names: Sequence[str] | None = kwargs.get("adapter_names")
        if names is not None and not self.disable_adapters:
            self._check_forward_args(x, adapter_names=names)
            used = [name for name in self.lora_A if name in set(names)]
        else:
            used = [name for name in self.active_adapters if name in self.lora_A]
        if self.disable_adapters or self.merged or not used:
            return super().forward(x, *args, **kwargs)
        if names is None and self._is_short_evaluation(x, used):
            return super().forward(x, *args, **kwargs)
        obstacle = self._find_obstacle(x, used, kwargs)
        if obstacle is not None:
            if not torch.compiler.is_compiling():
                _log_once(obstacle)
            return super().forward(x, *args, **kwargs)
        kwargs = {
            key: value
            for key, value in kwargs.items()
            if key != "adapter_names" and key not in VARIANT_KWARG_KEYS
        }
        adapters = [_adapter_of(self, name) for name in used]
        seeds = self._draw_seeds(adapters)
        if names is not None:
            named = names if isinstance(names, AdapterNames) else AdapterNames(names)
            _, rows = named.group_rows(list(self.lora_A), x)
            return self._run(x, args, kwargs, adapters, rows, seeds)
        if len(adapters) == 1:
            return self._run(x, args, kwargs, adapters, None, seeds)
        y = self._run(x, args, kwargs, adapters[:1], None, _seed_of(seeds, 0))
        for number in range(1, len(adapters)):
            y = add(y, x, [adapters[number]], seed=_seed_of(seeds, number))
        return y

    def _run(
        self,
        x: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        adapters: list[Adapter],
        rows: AdapterRows | None,
        seeds: Tensor | int,
    ) -> Tensor:
        """Return the base's output with the adapters of each row, at most one a row, added."""
        base: Any = self.base_layer
        if args or kwargs or find_base_obstacle(base) is not None:
            return add(base(x, *args, **kwargs), x, adapters, rows, seed=seeds)
        weight, bias = base.weight, base.bias
        if can_split_rows(weight):
            return add(multiply_by_rows(x, weight, bias), x, adapters, rows, seed=seeds)
        if weight.dtype != x.dtype and not is_autocasting(x.device):
            return add(base(x), x, adapters, rows, seed=seeds)  # which refuses it, as PEFT does
        if type(base) is Conv1D:
            weight = weight.t()
        return linear(x, weight, bias, adapters, rows, seed=seeds)

    def _find_obstacle(self, x: Tensor, used: list[str], kwargs: dict[str, Any]) -> str | None:
        """Return why this call is PEFT's; None where it is not."""
        if any(kwargs.get(key) is not None for key in VARIANT_KWARG_KEYS):
            return "arguments of a LoRA variant are given"
        if not isinstance(x, Tensor) or x.dim() < 2 or not x.dtype.is_floating_point:
            return "the input is not a floating-point tensor of at least two dimensions"
        if not has_strides(x):
            return "the input is nested, sparse or of a layout without strides"
        if is_distributed(x):
            return "the input is a DTensor"
        if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
            return "the call is traced by torch.jit"
        if self._is_random(used) and is_transformed():
            return "a transformation of torch.func decides how dropout is drawn"
        for name in used:
            obstacle = find_adapter_obstacle(self, name)
            if obstacle is not None:
                return obstacle
            down = self.lora_A[name].weight
            if down.device != x.device:
                return f"adapter {name!r} is on {down.device} and the input on {x.device}"
            if down.dtype != x.dtype and not getattr(self, "cast_input_dtype_enabled", True):
                return "the input's dtype is not cast to the adapter's"
        return None

    def _is_short_evaluation(self, x: Tensor, used: list[str]) -> bool:
        """Return whether PEFT's call is the faster one: nothing is kept, masked or moved twice."""
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        is_short = isinstance(x, Tensor) and not x.is_nested and x.numel() <= _FEW_ELEMENTS
        return is_short and not self._is_random(used)

    def _is_random(self, used: list[str]) -> bool:
        dropouts: list[nn.Module] = [self.lora_dropout[name] for name in used]
        return any(each.training and type(each) is nn.Dropout for each in dropouts)

    def _draw_seeds(self, adapters: list[Adapter]) -> Tensor | int:
        """Return a seed for each adapter, from torch's default generator and the process' rank.

        Without dropout nothing is drawn, and the seed is 0.
        """
        if not any(adapter.dropout for adapter in adapters):
            return 0
        seeds = draw_seeds(len(adapters))
        if not torch.compiler.is_compiling() and type(seeds) is Tensor and not current_modes():
            note_seeds(self, seeds.tolist())
        return seeds


class FusedLinear(FusedLayer, Linear):
    """PEFT's `Linear`, fused."""


class FusedTorchaoLinear(FusedLayer, TorchaoLoraLinear):
    """PEFT's layer around a quantised base of torchao, fused.

    Merging, which quantises the base again, is that of PEFT's class.
    """


_fused_types: dict[type, type] = {Linear: FusedLinear, TorchaoLoraLinear: FusedTorchaoLinear}
_BITSANDBYTES = ("peft.tuners.lora.bnb", ("Linear4bit", "Linear8bitLt"))


def find_fused_type(kind: type) -> type | None:
    """Return the fused class for the exact class of a layer of PEFT's; None where there is none.

    Those of bitsandbytes compute their base's product themselves, and the adapters are added.
    """
    module, names = _BITSANDBYTES
    if kind not in _fused_types and kind.__module__ == module and kind.__name__ in names:
        _fused_types[kind] = type(f"Fused{kind.__name__}", (FusedLayer, kind), {})
    return _fused_types.get(kind)


def find_stock_type(kind: type) -> type | None:
    """Return PEFT's class for a fused one; None where it is not fused."""
    return next((stock for stock, fused in _fused_types.items() if fused is kind), None)


def draw_seeds(num_seeds: int) -> Tensor:
    """Return seeds of dropout masks from torch's default generator: int64, on the CPU.

    Processes of `torch.distributed` whose generators are alike draw different ones.
    """
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_seeds,), dtype=torch.int64, device="cpu")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        seeds = seeds + torch.distributed.get_rank() * _RANK_FACTOR
    return seeds


def _seed_of(seeds: Tensor | int, number: int) -> Tensor | int:
    return seeds if isinstance(seeds, int) else seeds[number : number + 1]


def find_adapter_obstacle(layer: Linear, name: str) -> str | None:
    """Return why calls with an adapter are PEFT's; None where they are not."""
    if name in layer.lora_variant:
        return f"adapter {name!r} is a variant of LoRA, {type(layer.lora_variant[name]).__name__}"
    down, up, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    for of, module, types in zip(_PARTS, (down, up, dropout), _PART_TYPES, strict=True):
        if type(module) not in types:
            return f"{of} of adapter {name!r} is a {type(module).__name__}"
        if is_watched(module):
            return f"{of} of adapter {name!r} has hooks or a forward of its own"
    if down.bias is not None or up.bias is not None:
        return f"adapter {name!r} has a bias"
    if is_distributed(down.weight) or is_distributed(up.weight):
        return f"adapter {name!r} is sharded"
    if type(dropout) is nn.Dropout and dropout.p >= 1:
        return f"adapter {name!r} drops all of its input"
    scaling: Any = layer.scaling[name]
    if not isinstance(scaling, int | float) or not math.isfinite(scaling):
        return f"the scaling of adapter {name!r} is no finite number: {_describe(scaling)}"
    return None


def find_base_obstacle(base: nn.Module) -> str | None:
    """Return why the base layer is called before the adapters are added; None where it is not."""
    if type(base) not in (nn.Linear, Conv1D):
        return f"the base layer is a {type(base).__name__}"
    if is_watched(base):
        return "the base layer has hooks or a forward of its own"
    weight: Any = base.weight
    if type(weight) not in PLAIN and not can_split_rows(weight):
        kind = type(weight.data if type(weight) is nn.Parameter else weight)
        return f"the base layer's weight is a {kind.__name__}"
    return None


def is_watched(module: nn.Module) -> bool:
    """Return whether hooks or a replaced `forward` would not run if a module is not called."""
    return bool(
        "forward" in module.__dict__
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def is_distributed(tensor: object) -> bool:
    """Return whether a tensor is sharded over processes."""
    return type(tensor) not in PLAIN and hasattr(tensor, "device_mesh")


def _describe(scaling: Any) -> str:
    return f"a {type(scaling).__name__}" if isinstance(scaling, Tensor) else repr(scaling)


def _adapter_of(layer: Linear, name: str) -> Adapter:
    down: Any = layer.lora_A[name]
    up: Any = layer.lora_B[name]
    dropout = layer.lora_dropout[name]
    return Adapter(
        down.weight,
        up.weight,
        scaling=float(layer.scaling[name]),
        dropout=float(dropout.p) if type(dropout) is nn.Dropout and dropout.training else 0.0,
    )


@functools.cache
def _log_once(obstacle: str) -> None:
    logger.info("a LoRA layer is computed as PEFT does: %s", obstacle)
