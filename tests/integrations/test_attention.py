"""Models of Transformers compute by blocks what they compute by SDPA and eagerly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

import penstock  # noqa: E402
from penstock.attention import Layout, blocksparse  # noqa: E402
from penstock.errors import PenstockError  # noqa: E402
from penstock.integrations.transformers import _attention, register_attention  # noqa: E402
from penstock.integrations.transformers._attention_mask import read_rule  # noqa: E402

NUM_TOKENS = 48
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@pytest.fixture(autouse=True)
def registered():
    register_attention()


def make_model(kind: str = "Llama", **settings) -> torch.nn.Module:
    config_class = getattr(transformers, f"{kind}Config")
    config = config_class(**{**SIZES, **settings}, pad_token_id=0)
    torch.manual_seed(0)
    name = f"{kind}ForMaskedLM" if kind == "Bert" else f"{kind}ForCausalLM"
    return getattr(transformers, name)(config).eval()


def logits_of(model: torch.nn.Module, implementation: str, **inputs) -> Tensor:
    model.set_attn_implementation(implementation)
    return model(**inputs).logits


@pytest.fixture
def calls(monkeypatch) -> list[Layout]:
    """Layouts of the calls of `blocksparse`."""
    found: list[Layout] = []

    def watch(q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options) -> Tensor:
        found.append(layout)
        return blocksparse(q, k, v, layout, **options)

    monkeypatch.setattr(_attention, "blocksparse", watch)
    return found


def tokens_of(batch: int = 2) -> Tensor:
    return torch.randint(1, 64, (batch, NUM_TOKENS), generator=torch.Generator().manual_seed(1))


def positions_of(*rows: list[int]) -> Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


INPUTS = {
    "causal": {},
    "packed": {"position_ids": positions_of([20, 3, 25], [40, 8])},
    "one packed row": {"position_ids": positions_of([20, 3, 25], [48])},
    "padded right": {"attention_mask": (torch.arange(48) < torch.tensor([[48], [21]])).long()},
    "padded left": {"attention_mask": (torch.arange(48) >= torch.tensor([[0], [21]])).long()},
    "padded within": {"attention_mask": torch.ones(2, 48).index_fill(1, torch.tensor([7, 30]), 0)},
}


KINDS = {"Llama": {}, "Mistral": {"sliding_window": 9}, "Bert": {}}
CASES = [  # masks of encoders do not know packed documents
    (kind, name) for kind in KINDS for name in INPUTS if kind != "Bert" or "packed" not in name
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_model_computes_what_it_computes_by_sdpa(kind: str, name: str, calls):
    model = make_model(kind, **KINDS[kind])
    inputs = {"input_ids": tokens_of(), **INPUTS[name]}
    if kind != "Bert":
        inputs["use_cache"] = False
    mask = inputs.get("attention_mask", torch.ones(2, NUM_TOKENS)).bool()
    results = []
    for implementation in ("sdpa", "penstock"):
        model.zero_grad()
        logits = logits_of(model, implementation, **inputs)[mask]
        logits.square().mean().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results.append([logits, *gradients])
    assert len(calls) == 2
    for found, expected in zip(results[1], results[0], strict=True):
        assert torch.allclose(found, expected, rtol=1e-4, atol=2e-6)


def test_packed_documents_have_the_losses_of_documents_alone(calls):
    lengths = [21, 9, 18]
    model = make_model()
    tokens = tokens_of(1)
    packed = logits_of(
        model, "penstock", input_ids=tokens, position_ids=positions_of(lengths), use_cache=False
    )
    assert calls[0].density == 1.0 and calls[0].num_queries == NUM_TOKENS
    losses = torch.nn.functional.cross_entropy(packed[0, :-1], tokens[0, 1:], reduction="none")
    start = 0
    for length in lengths:
        alone = tokens[:, start : start + length]
        logits = logits_of(model, "sdpa", input_ids=alone)
        expected = torch.nn.functional.cross_entropy(logits[0, :-1], alone[0, 1:])
        found = losses[start : start + length - 1].mean()
        assert torch.allclose(found, expected, rtol=1e-5)
        start += length


@pytest.mark.parametrize("has_positions", [True, False])
def test_a_collators_offsets_of_documents_are_taken(has_positions: bool, calls):
    rows = [{"input_ids": tokens_of(1)[0, :length].tolist()} for length in (20, 3, 25)]
    collator = transformers.DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, return_position_ids=has_positions
    )
    batch = collator(rows)
    batch.pop("labels")
    model = make_model()
    found = logits_of(model, "penstock", **batch, use_cache=False)
    offsets = batch.get("position_ids", positions_of([20, 3, 25]))
    masked = {"input_ids": batch["input_ids"], "position_ids": offsets, "use_cache": False}
    expected = logits_of(model, "sdpa", **masked)
    if not has_positions:  # SDPA has no offsets: positions of the whole row, by a mask of documents
        number = torch.arange(3).repeat_interleave(torch.tensor([20, 3, 25]))
        seen = (number[:, None] == number) & torch.ones(48, 48).tril().bool()
        masked["position_ids"] = torch.arange(48)[None]
        expected = logits_of(model, "sdpa", **masked, attention_mask=seen[None, None])
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["Llama", "Mistral"])
def test_generated_tokens_are_those_of_sdpa(kind: str, cache: str):
    model = make_model(kind, **({"sliding_window": 9} if kind == "Mistral" else {}))
    tokens = tokens_of()
    mask = (torch.arange(48) >= torch.tensor([[0], [21]])).long()
    answers = []
    for implementation in ("sdpa", "penstock"):
        model.set_attn_implementation(implementation)
        options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": mask}
        answers.append(model.generate(tokens, **options, cache_implementation=cache))
    assert torch.equal(*answers)


@pytest.mark.parametrize(
    ("kind", "settings", "inputs", "message"),
    [
        ("Gemma2", {"head_dim": 8}, {}, "softcap"),
        ("Llama", {"attention_dropout": 0.1}, {}, "attention_dropout to 0"),
        ("Llama", {}, {"attention_mask": torch.ones(2, 1, 48, 48).bool()}, "position_ids of"),
        ("Llama", {}, {"cu_seq_lens_q": torch.tensor([0, 20, 48])}, "use position_ids"),
    ],
    ids=["softcap", "dropout", "mask", "offsets"],
)
def test_arguments_that_are_not_offered_are_refused(
    kind: str, settings: dict, inputs: dict, message: str
):
    model = make_model(kind, **settings).train()
    with pytest.raises(PenstockError, match=message):
        logits_of(model, "penstock", input_ids=tokens_of(), use_cache=False, **inputs)


@pytest.mark.parametrize("name", ["full", "padded"])
def test_captured_steps_are_refused(name: str):
    model = make_model().train()
    model.set_attn_implementation("penstock")
    tokens = tokens_of()
    batch = {"input_ids": tokens, "labels": tokens}
    if name == "padded":
        batch["attention_mask"] = torch.ones_like(tokens)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(PenstockError, match="use attn_implementation='sdpa', or train without"):
        penstock.capture(model, optimizer, batch)


def test_masks_that_are_not_known_are_refused():
    from transformers import masking_utils

    causal, chunks = masking_utils.causal_mask_function, torch.zeros(1)
    for mask in (
        masking_utils.or_masks(causal, causal),
        masking_utils.chunked_causal_mask_function(8, chunks),
        lambda batch, head, query, key: key <= query,
    ):
        with pytest.raises(PenstockError, match="does not offer the mask function"):
            read_rule(mask)
