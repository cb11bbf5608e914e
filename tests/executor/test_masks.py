"""Masks that mask nothing: in half precision planned steps take the branch that eager ones take."""

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


def trained(masks, planned, dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = Half(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    batches = [{"input_ids": IDS, "labels": IDS, "attention_mask": mask} for mask in masks]
    if planned:
        others = batches[1:2] if dtype is torch.bfloat16 else []
        arguments = {"device_memory": "64MiB", "machine": MACHINE, "time_limit": 0.05}
        step = penstock.fit(
            model, optimizer, batches[0], extra_batches=others, cache=False, **arguments
        )
        losses = [step(batch) for batch in batches]
    else:
        losses = []
        for batch in batches:
            optimizer.zero_grad()
            loss = model(**batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return everything(model, optimizer, losses)


@pytest.mark.parametrize("masks", [(FULL,), (PADDED,), (FULL, PADDED, FULL)])
def test_bits_are_eagers(masks):
    assert differences(trained(masks, False), trained(masks, True), "") == []


def test_a_step_for_full_masks_refuses_others():
    torch.manual_seed(0)
    model = Half(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    batch = {"input_ids": IDS, "labels": IDS, "attention_mask": FULL}
    arguments = {"device_memory": "64MiB", "machine": MACHINE, "time_limit": 0.05, "cache": False}
    step = penstock.fit(model, optimizer, batch, **arguments)
    before = everything(model, optimizer, [])
    with pytest.raises(ValueError, match="attention_mask masks tokens"):
        step({**batch, "attention_mask": PADDED})
    assert differences(before, everything(model, optimizer, []), "") == []


def test_in_single_precision_one_plan_is_for_all_masks():
    masks = (FULL, PADDED)
    expected = trained(masks, False, torch.float32)
    found = trained(masks, True, torch.float32)
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-6, atol=0)


def test_a_step_for_any_mask_takes_full_ones_too():
    """The program that is captured again beside the second step is for any mask, as the step is."""
    torch.manual_seed(0)
    model = Half(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    batch = {"input_ids": IDS, "labels": IDS, "attention_mask": PADDED}
    arguments = {"device_memory": "64MiB", "machine": MACHINE, "time_limit": 0.05, "cache": False}
    step = penstock.fit(model, optimizer, batch, **arguments)
    expected = trained((PADDED, FULL), False)["losses"]
    found = [step({**batch, "attention_mask": mask}) for mask in (PADDED, FULL)]
    assert found[0].equal(expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-2, atol=0)
    assert step.report().num_captures_again == 1
