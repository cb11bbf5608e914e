"""Caches for `generate`, and the attention implementation that models have while one lives."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    EncoderDecoderCache,
    get_layer_types_and_kwargs,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from penstock.errors import PenstockError
from penstock.kv._pool import BlockPool
from penstock.kv._report import PoolReport
from penstock.kv.transformers._attention import attend_interface
from penstock.kv.transformers._inputs import AttentionInputs
from penstock.kv.transformers._layer import PooledLayer
from penstock.kv.transformers._mask import make_range_mask
from penstock.memory import FileStore

IMPLEMENTATION = "penstock_kv"
"""Name of the attention implementation in Transformers' registries."""

_FULL = {"full_attention"}
_SLIDING = {"sliding_attention", "chunked_attention"}


class PooledCache(Cache):
    """Cache of a decoder's keys and values in a `BlockPool`; made by `penstock.kv.cache`.

    Usable in a `with` block, which closes it.

    Attributes:
        pool: The pool.
    """

    def __init__(self, layers: list[Any], pool: BlockPool) -> None:
        super().__init__(layers=layers)
        self.pool = pool
        self._release: weakref.finalize | None = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make sequence i a copy of sequence `beam_idx[i]`, in all layers."""
        self.pool.reorder(beam_idx, self._flush())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make every sequence `repeats` sequences, one after the other."""
        self.pool.repeat(repeats, self._flush())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences `indices`, numbers or a bool mask."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self.pool.reorder(indices, self._flush())

    def report(self) -> PoolReport:
        """Return bytes per tier and counts so far."""
        return self.pool.report()

    def close(self) -> None:
        """Give back memory and file, and the model its attention. Further calls do nothing."""
        self.pool.close()
        if self._release is not None:
            self._release()

    def __enter__(self) -> PooledCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _flush(self) -> list[int]:
        """Move what is pending to the pool; return the numbers of the layers there."""
        layers = [layer for layer in self.layers if isinstance(layer, PooledLayer)]
        for layer in layers:
            layer.flush()
        return [layer.index for layer in layers]


class PooledEncoderDecoderCache(EncoderDecoderCache):
    """Caches of a decoder's own keys and of those of the encoder's output, in one pool."""

    def __init__(self, own: PooledCache, cross: PooledCache) -> None:
        super().__init__(own, cross)
        self.pool = own.pool
        self._own = own

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of the decoder."""
        self.self_attention_cache.crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make every sequence `repeats` sequences, one after the other."""
        self.self_attention_cache.batch_repeat_interleave(repeats)
        self.cross_attention_cache.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences `indices`, numbers or a bool mask."""
        self.self_attention_cache.batch_select_indices(indices)
        self.cross_attention_cache.batch_select_indices(indices)

    def report(self) -> PoolReport:
        """Return bytes per tier and counts so far."""
        return self.pool.report()

    def close(self) -> None:
        """Give back memory and file, and the model its attention. Further calls do nothing."""
        self._own.close()

    def __enter__(self) -> PooledEncoderDecoderCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def cache(
    model: PreTrainedModel,
    *,
    device_memory: int | str,
    host_memory: int | str | None = None,
    store: FileStore | str | None = None,
    selector: object = "all",
    block_tokens: int = 64,
    keep_inputs: bool = False,
) -> PooledCache | PooledEncoderDecoderCache:
    """Make a cache for `model.generate(..., past_key_values=cache)` that is larger than memory.

    While the cache lives, the model's attention implementation is Penstock's. Close the cache, or
    let it die, to have the old one back.

    Example:
        >>> cache = penstock.kv.cache(model, device_memory="2GiB", store="/mnt/nvme")
        ... # doctest: +SKIP
        >>> model.generate(**inputs, past_key_values=cache, prefill_chunk_size=4096)
        ... # doctest: +SKIP

    Args:
        model: A model of Transformers on the CPU, not compiled.
        device_memory: Budget of resident blocks and staging, as an int or text such as `"2GiB"`.
            The unfinished block of each sequence and layer is beyond it.
        host_memory: The most bytes of host memory below; None: as much as is needed, or none where
            there is a store.
        store: Directory, or `FileStore`, of the file below; None: no file.
        selector: Blocks that steps of few tokens read in layers without a window: `"all"` (exact),
            `"window"`, `"nosa"` or `"accumulated"` (a sixteenth of the blocks), or a selector, or a
            function `(query, layer, pool) -> blocks`.
        block_tokens: Tokens of a block.
        keep_inputs: Whether the inputs of layers without a window are stored as well, so that
            missing blocks are computed from them where that is faster than to read them from the
            file. Keys that are computed again may differ in the last bits.

    Returns:
        A cache of Transformers; for an encoder-decoder model, one of both attentions.

    Raises:
        TypeError: `model` is not a model of Transformers.
        PenstockError: The model computes attention itself, or has layers that are not supported.
        ValueError: An argument is wrong.
        StoreUnavailableError: The directory cannot be used.
    """
    _check_model(model)
    config = model.config.get_text_config(decoder=True)
    kinds, settings = get_layer_types_and_kwargs(config)
    unknown = sorted(set(kinds) - _FULL - _SLIDING - {"dummy"})
    if unknown:
        raise PenstockError(
            f"{type(model).__name__} has layers of the types {unknown}, which penstock.kv.cache "
            "does not support; use another cache"
        )
    is_pair = bool(model.config.is_encoder_decoder)
    modules = _find_attention(model)
    if is_pair and keep_inputs:
        raise PenstockError(
            f"keep_inputs=True: {type(model).__name__} is an encoder-decoder model, of which no "
            "inputs are kept; leave it out"
        )
    names = {i: f"{name} ({type(module).__name__})" for i, (name, module) in modules.items()}
    inputs = {
        i: AttentionInputs(modules[i][1], names[i])
        for i, kind in enumerate(kinds)
        if keep_inputs and kind in _FULL and i in modules
    }
    pool = BlockPool(
        device_memory=device_memory,
        host_memory=host_memory,
        store=store,
        block_tokens=block_tokens,
        num_layers=(1 + is_pair) * sum(kind != "dummy" for kind in kinds),
        selector=selector,
        selected_layers=[i for i, kind in enumerate(kinds) if kind in _FULL],
        recompute=(lambda layer, given: inputs[layer].compute(given)) if keep_inputs else None,
    )
    own = PooledCache(
        [
            DummyLayer()
            if kind == "dummy"
            else PooledLayer(
                pool, i, names.get(i, f"layer {i}"), some.get("sliding_window"), inputs.get(i)
            )
            for i, (kind, some) in enumerate(zip(kinds, settings, strict=True))
        ],
        pool,
    )
    hooks = [hook for each in inputs.values() for hook in each.hooks]
    own._release = weakref.finalize(own, _restore, weakref.ref(model), hooks)
    _install(model)
    if not is_pair:
        return own
    cross = [
        PooledLayer(pool, len(kinds) + i, f"{names.get(i, f'layer {i}')} (cross attention)")
        for i in range(len(kinds))
    ]
    return PooledEncoderDecoderCache(own, PooledCache(cross, pool))


@dataclass
class _Installation:
    """Caches of one model, and the implementations that its configurations had before."""

    num_caches: int = 0
    before: list[tuple[Any, str | None]] = field(default_factory=list)


_installations: weakref.WeakKeyDictionary[PreTrainedModel, _Installation] = (
    weakref.WeakKeyDictionary()
)


def _install(model: PreTrainedModel) -> None:
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attend_interface)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, make_range_mask)
    installation = _installations.setdefault(model, _Installation())
    if installation.num_caches == 0:
        configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
        for config in [model.config, *configs.values()]:
            for name in getattr(config, "sub_configs", {}):
                below = getattr(config, name, None)
                if below is not None:
                    configs.setdefault(id(below), below)
        installation.before = [
            (config, getattr(config, "_attn_implementation_internal", None))
            for config in configs.values()
        ]
        model.set_attn_implementation(IMPLEMENTATION)
    installation.num_caches += 1


def _restore(
    reference: weakref.ref[PreTrainedModel], hooks: Sequence[torch.utils.hooks.RemovableHandle]
) -> None:
    for hook in hooks:
        hook.remove()
    model = reference()
    installation = None if model is None else _installations.get(model)
    if installation is None:
        return
    installation.num_caches -= 1
    if installation.num_caches == 0:
        for config, before in installation.before:
            config._attn_implementation_internal = before


def _check_model(model: object) -> None:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model must be a transformers.PreTrainedModel; got {type(model).__name__} (of a "
            "compiled model or a wrapper, pass the model inside)"
        )
    if not model._can_set_attn_implementation():
        raise PenstockError(
            f"{type(model).__name__} computes its attention itself, not through Transformers' "
            "attention interface, which penstock.kv.cache needs; use another cache"
        )
    if model.device.type != "cpu":
        raise PenstockError(
            f"penstock.kv.cache runs on the CPU; {type(model).__name__} is on {model.device}"
        )


def _find_attention(model: PreTrainedModel) -> dict[int, tuple[str, torch.nn.Module]]:
    """Return the name and the module of each layer's attention."""
    found: dict[int, tuple[str, torch.nn.Module]] = {}
    for name, module in model.named_modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and "attention" in type(module).__name__.lower():
            found.setdefault(index, (name, module))
    return found
