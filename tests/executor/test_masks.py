"""Masks that mask nothing: in half precision planned steps take the branch that eager ones take."""

import functools

import pytest
import torch
from torch import nn

import penstock
from _planned import MACHINE, differences, everything

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
IDS = torch.randint(0, 100, (4, 16), generator=torch.Generator().manual_seed(0))
FULL = torch.ones_like(IDS)
PADDED = FULL.clone()
PADDED[1, 10:] = 0


class Half(nn.Module):
    """Grouped-query attention in bfloat16."""

    def __init__(self, dtype):
        super().__init__()
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(vocab_size=100, **sizes, **heads)
        self.model = transformers.LlamaForCausalLM(config)
        self._dtype = dtype

    def forward(self, **batch):
        with torch.autocast("cpu", self._dtype, enabled=self._dtype is not torch.float32):
            return self.model(**batch).loss


def batch_of(mask):
    return {"input_ids": IDS, "labels": IDS, "attention_mask": mask}


def trainee(dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = Half(dtype)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def fitted(model, optimizer, first, *others):
    arguments = {"device_memory": "64MiB", "machine": MACHINE, "time_limit": 0.05, "cache": False}
    others = [batch_of(mask) for mask in others]
    return penstock.fit(model, optimizer, batch_of(first), extra_batches=others, **arguments)


@functools.cache
def trained(masks, dtype=torch.bfloat16):
    """Results of ordinary training, for comparisons only."""
    model, optimizer = trainee(dtype)
    losses = []
    for mask in masks:
        optimizer.zero_grad()
        loss = model(**batch_of(mask))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return everything(model, optimizer, losses)


def unlike_eager(model, optimizer, step, masks):
    losses = [step(batch_of(mask)) for mask in masks]
    return differences(trained(masks), everything(model, optimizer, losses), "")


def test_bits_are_eagers():
    model, optimizer = trainee()
    step = fitted(model, optimizer, FULL, PADDED)
    assert unlike_eager(model, optimizer, step, (FULL, PADDED, FULL)) == []


def test_a_step_for_full_masks_refuses_others():
    model, optimizer = trainee()
    step = fitted(model, optimizer, FULL)
    before = everything(model, optimizer, [])
    with pytest.raises(ValueError, match="attention_mask masks tokens"):
        step(batch_of(PADDED))
    assert differences(before, everything(model, optimizer, []), "") == []
    assert unlike_eager(model, optimizer, step, (FULL,)) == []


def test_in_single_precision_one_plan_is_for_all_masks():
    masks = (FULL, PADDED)
    expected = trained(masks, torch.float32)["losses"]
    step = fitted(*trainee(torch.float32), FULL)
    torch.testing.assert_close(
        [step(batch_of(mask)) for mask in masks], expected, rtol=1e-6, atol=0
    )


def test_a_step_for_any_mask_takes_full_ones_too():
    """The program that is captured again beside the second step is for any mask, as the step is."""
    model, optimizer = trainee()
    step = fitted(model, optimizer, PADDED)
    expected = trained((PADDED, FULL))["losses"][1]
    assert unlike_eager(model, optimizer, step, (PADDED,)) == []
    torch.testing.assert_close(step(batch_of(FULL)), expected, rtol=1e-2, atol=0)
    assert step.report().num_captures_again == 1
