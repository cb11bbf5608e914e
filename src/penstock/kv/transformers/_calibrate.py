"""Calibration run of a model of Transformers: the label channels that `DoubleSparsity` reads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from penstock.errors import PenstockError
from penstock.kv.selectors import ChannelCalibration

_IMPLEMENTATION = "penstock_calibration"


def calibrate(
    model: PreTrainedModel, batches: Iterable[torch.Tensor], *, num_channels: int
) -> list[torch.Tensor]:
    """Find the channels of each layer and KV head that contribute most to queries times keys.

    The model runs over the texts without a cache and computes what it always computes.

    Example:
        >>> channels = penstock.kv.calibrate(model, [input_ids], num_channels=16)
        ... # doctest: +SKIP
        >>> selector = penstock.kv.DoubleSparsity(channels, share=1 / 16)  # doctest: +SKIP

    Args:
        model: A decoder of Transformers, on any device.
        batches: Token numbers of texts, each int64 `(B, n)` without padding; a few thousand tokens
            of what the model will read are enough.
        num_channels: Channels kept per head; a sixteenth to a quarter of the head size is usual.

    Returns:
        Per layer int64 `(KV heads, num_channels)`, ascending.

    Raises:
        PenstockError: The model computes its attention itself, or has an encoder.
        ValueError: There is no batch, or `num_channels` exceeds the head size.

    Source:
        Yang et al., arXiv:2408.07092, section 3.1 (offline calibration).
    """
    if model.config.is_encoder_decoder or not model._can_set_attn_implementation():
        raise PenstockError(
            f"calibrate takes decoders that use Transformers' attention interface; "
            f"{type(model).__name__} has an encoder or computes its attention itself"
        )
    before = model.config._attn_implementation or "eager"
    calibration = ChannelCalibration()

    def attend(module: torch.nn.Module, query: Any, key: Any, *args: Any, **options: Any) -> Any:
        layer = module.layer_idx
        assert isinstance(layer, int)
        calibration.note(layer, query, key)
        return _attention_of(module, before)(module, query, key, *args, **options)

    ALL_ATTENTION_FUNCTIONS.register(_IMPLEMENTATION, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_IMPLEMENTATION, ALL_MASK_ATTENTION_FUNCTIONS[before])
    was_training = model.training
    model.eval()
    model.set_attn_implementation(_IMPLEMENTATION)
    try:
        with torch.no_grad():
            for input_ids in batches:
                model(input_ids=input_ids.to(model.device), use_cache=False)
    finally:
        model.set_attn_implementation(before)
        model.train(was_training)
    return calibration.channels(num_channels)


def _attention_of(module: torch.nn.Module, implementation: str) -> Callable[..., Any]:
    if implementation in ALL_ATTENTION_FUNCTIONS.valid_keys():
        return ALL_ATTENTION_FUNCTIONS[implementation]
    return sys.modules[type(module).__module__].eager_attention_forward
