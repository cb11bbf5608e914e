"""Calibration through Transformers against queries and keys taken from a projection."""

import pytest
import torch

from kv_models import MODELS, VOCABULARY
from penstock.errors import PenstockError
from penstock.kv.selectors import ChannelCalibration, DoubleSparsity
from penstock.kv.transformers._calibrate import calibrate


def draw_texts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, VOCABULARY, (2, 50), generator=generator) for _ in range(2)]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_channels_are_those_of_the_models_queries_and_keys(implementation):
    torch.manual_seed(0)
    model = MODELS["gpt2"]()
    model.set_attn_implementation(implementation)
    model.train()  # with dropout, which a calibration is without
    channels = calibrate(model, draw_texts(), num_channels=5)
    assert model.training
    assert model.config._attn_implementation == implementation

    expected = ChannelCalibration()

    def note(layer):
        def hook(module, inputs, output):
            query, keys, _ = output.unflatten(2, (3, 2, 32)).permute(2, 0, 3, 1, 4)
            expected.note(layer, query, keys)

        return hook

    for layer, block in enumerate(model.transformer.h):
        block.attn.c_attn.register_forward_hook(note(layer))
    model.eval()
    with torch.no_grad():
        for text in draw_texts():
            model(text)
    assert len(channels) == 2
    assert all(torch.equal(a, b) for a, b in zip(channels, expected.channels(5), strict=True))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_grouped_heads_give_channels_per_head_of_keys(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    model.eval()
    text = draw_texts()[0]
    with torch.no_grad():
        before = model(text).logits
        channels = calibrate(model, [text], num_channels=8)
        assert torch.equal(model(text).logits, before)
    assert [tuple(chosen.shape) for chosen in channels] == [(2, 8)] * len(channels)
    DoubleSparsity(channels, share=1 / 16)


def test_what_cannot_be_calibrated_is_refused():
    with pytest.raises(PenstockError, match="has an encoder"):
        calibrate(MODELS["t5"](), [], num_channels=4)
    with pytest.raises(ValueError, match="every layer"):
        calibrate(MODELS["llama"](), [], num_channels=4)
    with pytest.raises(ValueError, match="num_channels"):
        calibrate(MODELS["llama"](), draw_texts(), num_channels=33)
