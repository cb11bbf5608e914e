"""What `penstock.kv` refuses, by name, before it computes something else."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from kv_models import assert_same, generate, make_model, make_prompt, transformers
from penstock.errors import CapacityError, InfeasibleError, PenstockError
from penstock.kv.transformers._layer import KeysPlaceholder

pytestmark = pytest.mark.usefixtures("one_thread")


def make_cache(model: Any, budget: int | str = "64KiB", **options: Any) -> Any:
    return penstock.kv.cache(model, device_memory=budget, block_tokens=16, **options)


def test_an_older_transformers(monkeypatch: pytest.MonkeyPatch):
    name = "penstock.kv.transformers"
    monkeypatch.delattr(transformers.cache_utils, "DummyLayer")
    for loaded in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, loaded)
    with pytest.raises(ImportError, match=r"need Transformers 5.23 or later \(pip install"):
        importlib.import_module(name)


def test_gradients():
    model, prompt = make_model("llama"), make_prompt(40)
    with make_cache(model) as cache, pytest.raises(PenstockError, match="inference_mode"):
        model(**prompt, past_key_values=cache)


def test_training_mode():
    model, prompt = make_model("llama").train(), make_prompt(40)
    with make_cache(model) as cache, torch.no_grad():
        with pytest.raises(PenstockError, match=r"LlamaForCausalLM is in training.*model\.eval"):
            model(**prompt, past_key_values=cache)
        model.eval().model.layers[0].train()
        with pytest.raises(PenstockError, match=r"layers\.0\.self_attn.*model\.eval"):
            model(**prompt, past_key_values=cache)


def test_training_mode_with_gradient_checkpointing_which_would_leave_out_the_cache():
    model, prompt = make_model("llama").train(), make_prompt(40)
    model.activation_checkpointing_enable()
    with make_cache(model) as cache, torch.no_grad():
        for called in (model, model.model):
            with pytest.raises(PenstockError, match=r"training mode; call model\.eval"):
                called(**prompt, past_key_values=cache)
        model(**prompt)  # a call beside the cache
        expected = generate(model.eval(), prompt, 4)
        assert_same(generate(model, prompt, 4, past_key_values=cache), expected)


@pytest.mark.parametrize("name", ["OPT", "StableLm", "GPTBigCode"])
def test_attention_weights_of_models_that_would_leave_them_out(name: str):
    sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1}
    sizes |= {"num_key_value_heads": 2} if name == "StableLm" else {}
    config = getattr(transformers, f"{name}Config")(**sizes, num_attention_heads=2)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    ids = torch.randint(3, 100, (1, 20))
    with make_cache(model) as cache, torch.no_grad():
        for called in (model, model.base_model):
            with pytest.raises(PenstockError, match="output_attentions=True: attention over a"):
                called(ids, past_key_values=cache, output_attentions=True)
        model(ids, past_key_values=cache)
        assert cache.get_seq_length() == 20
    assert model(ids, output_attentions=True).attentions is not None  # without the cache


def test_attention_weights():
    model, prompt = make_model("llama"), make_prompt(40)
    with make_cache(model) as cache, torch.no_grad():
        with pytest.raises((PenstockError, ValueError), match="output_attentions"):
            model(**prompt, past_key_values=cache, output_attentions=True)


def test_attention_sinks_of_another_shape():
    model = make_model("granite")
    for module in model.modules():
        if hasattr(module, "sinks"):
            module.sinks.data = torch.zeros(3)
    with make_cache(model) as cache, torch.no_grad():
        with pytest.raises(PenstockError, match=r"s_aux= of the shape \(3,\).*\(4,\)"):
            model(**make_prompt(40), past_key_values=cache)


def test_training_with_attention_sinks_beside_a_cache():
    model = make_model("gpt_oss")
    with make_cache(model), pytest.raises(PenstockError, match=r"attention sinks.*close the cache"):
        model(**make_prompt(40))


def test_a_model_that_computes_attention_itself():
    settings = transformers.BloomConfig(vocab_size=89, hidden_size=32, n_layer=2, n_head=2)
    model = transformers.BloomForCausalLM(settings)
    with pytest.raises(PenstockError, match="BloomForCausalLM computes its attention itself"):
        make_cache(model)


def test_a_model_that_prepares_its_caches_itself():
    sizes = {"vocab_size": 89, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model = transformers.T5GemmaForConditionalGeneration(
        transformers.T5GemmaConfig(encoder=sizes, decoder=sizes, vocab_size=89)
    )
    with pytest.raises(PenstockError, match="T5GemmaForConditionalGeneration prepares"):
        make_cache(model)


def test_layers_without_keys():
    settings = transformers.Lfm2Config(
        vocab_size=89,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
    )
    with pytest.raises(PenstockError, match=r"layers of the types \['conv'\]"):
        make_cache(transformers.Lfm2ForCausalLM(settings))


def test_layers_of_cross_attention_among_the_others():
    settings = transformers.MllamaConfig().text_config
    sizes = {"vocab_size": 89, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    special = {f"{name}_token_id": 0 for name in ("bos", "eos", "pad")}
    sizes = {**sizes, **special, "num_attention_heads": 2, "num_key_value_heads": 2}
    settings = type(settings)(**sizes, cross_attention_layers=[1])
    with pytest.raises(PenstockError, match=r"layers of the types \['cross_attention'\]"):
        make_cache(transformers.MllamaForCausalLM(settings))


def test_what_is_no_model():
    with pytest.raises(TypeError, match="PreTrainedModel"):
        make_cache(torch.nn.Linear(2, 2))


def test_other_uses_of_keys():
    model = make_model("llama")
    with make_cache(model) as cache:
        keys, _ = cache.update(torch.rand(1, 2, 5, 32), torch.rand(1, 2, 5, 32), 1)
        assert isinstance(keys, KeysPlaceholder)
        assert keys.shape == (1, 2, 5, 32)
        for use in (lambda: keys.transpose(1, 2), lambda: keys + 1, lambda: keys.float() @ keys.mT):
            with pytest.raises(PenstockError, match=r"layers\.1\.self_attn \(LlamaAttention\)"):
                use()


def test_another_attention_implementation():
    model, prompt = make_model("llama"), make_prompt(40)
    with make_cache(model) as cache:
        model.set_attn_implementation("sdpa")
        with pytest.raises(PenstockError, match=r"layers\.0\.self_attn"):
            generate(model, prompt, 2, past_key_values=cache)


def test_copies():
    for kind in ("llama", "t5"):
        model = make_model(kind)
        with make_cache(model) as cache:
            for each in (cache, cache.pool):
                for make in (copy.copy, copy.deepcopy, pickle.dumps):
                    with pytest.raises(PenstockError, match=r"cannot be copied or.*prefix="):
                        make(each)


def test_a_cache_of_another_model():
    first, second, prompt = make_model("llama"), make_model("gemma3"), make_prompt(100)
    theirs = generate(first, prompt, 4)
    with make_cache(first) as own, make_cache(second) as other:
        with pytest.raises(PenstockError, match=r"for a Gemma3ForCausalLM.*LlamaAttention"):
            generate(first, prompt, 4, past_key_values=other)
        assert_same(generate(first, prompt, 4, past_key_values=own), theirs)


def test_steps_that_add_all_tokens_again():
    model, prompt = make_model("llama"), make_prompt(20)
    with make_cache(model) as cache:
        with pytest.raises(ValueError, match="use_cache=False"):
            generate(model, prompt, 4, past_key_values=cache, use_cache=False)
        model.generation_config.use_cache = False
        with pytest.raises(ValueError, match="use_cache=False"):
            generate(model, prompt, 4, past_key_values=cache)
        assert cache.get_seq_length() == 0


def test_other_inputs_of_an_encoder_than_those_of_the_cache():
    model, prompt = make_model("t5"), make_prompt(30, num_padding=3)
    with make_cache(model) as cache:
        ours = generate(model, prompt, 4, past_key_values=cache)
        tokens = torch.cat([ours.sequences, ours.sequences[:, -1:]], 1)
        more = {"decoder_input_ids": tokens, "decoder_attention_mask": torch.ones_like(tokens)}
        other = {**prompt, **more, "input_ids": prompt["input_ids"].flip(1)}
        with pytest.raises(ValueError, match=r"other input_ids.*reset\(\)"):
            generate(model, other, 4, past_key_values=cache)
        theirs = generate(model, {**prompt, **more}, 4)
        assert_same(generate(model, {**prompt, **more}, 4, past_key_values=cache), theirs)
        cache.reset()
        assert_same(generate(model, other, 4, past_key_values=cache), generate(model, other, 4))


def test_other_sequences_and_dtypes_than_those_of_the_cache():
    model, tokens = make_model("llama"), make_prompt(20)["input_ids"]
    with make_cache(model) as cache, torch.no_grad():
        model(input_ids=tokens, past_key_values=cache)
        with pytest.raises(ValueError, match=r"2 sequences.*got 1 of.*reset\(\)"):
            model(input_ids=tokens[:1], past_key_values=cache)


def test_a_closed_cache():
    model, prompt = make_model("llama"), make_prompt(40)
    cache = make_cache(model)
    cache.close()
    with pytest.raises(PenstockError, match="closed"):
        generate(model, prompt, 2, past_key_values=cache)


def test_a_budget_below_one_block_per_layer(store: Path):
    model, prompt = make_model("llama"), make_prompt(40)
    least = 2 * 2 * 16 * 64 * 4  # layers, heads, tokens, numbers, bytes
    for options in ({}, {"store": store}):
        with make_cache(model, least - 1, **options) as cache:
            with pytest.raises(InfeasibleError, match="one block per layer") as caught:
                generate(model, prompt, 2, past_key_values=cache)
            assert caught.value.minimum_device_bytes == least
            assert cache.report().device_bytes == 0
        with make_cache(model, least, **options) as cache:
            generate(model, prompt, 2, past_key_values=cache)


def test_host_memory_without_a_file_runs_full():
    model, prompt = make_model("llama"), make_prompt(300)
    with make_cache(model, host_memory="64KiB") as cache:
        with pytest.raises(CapacityError, match=r"host_memory=64.*store="):
            generate(model, prompt, 2, past_key_values=cache)
        with pytest.raises(PenstockError, match="lost tokens"):
            generate(model, prompt, 2, past_key_values=cache)
        cache.reset()
        generate(model, make_prompt(30, num_padding=3), 2, past_key_values=cache)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"selector": "best"}, ValueError, "'window'"),
        ({"selector": 3}, TypeError, "selector"),
        ({"budget": "much"}, ValueError, "device_memory"),
        ({"host_memory": -1}, ValueError, "host_memory"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        make_cache(make_model("llama"), **options)


def test_failing_caches_leave_the_models_attention():
    model = make_model("llama")
    before = model.config._attn_implementation
    for options in ({"selector": "best"}, {"store": "/nowhere"}):
        with pytest.raises((ValueError, PenstockError)):
            make_cache(model, **options)
        assert model.config._attn_implementation == before


def test_a_crop_past_a_window():
    model, prompt = make_model("gemma3"), make_prompt(100, batch_size=1)
    with make_cache(model) as cache, torch.no_grad():
        model(**prompt, past_key_values=cache)
        with pytest.raises(RuntimeError, match="activate_past_recording"):
            cache.crop(-3)
        with pytest.raises(ValueError, match="negative"):
            cache.crop(3)


@pytest.mark.parametrize("is_late", [True, False])
def test_a_crop_to_tokens_whose_window_is_gone(is_late: bool):
    """Since all tokens were kept too late, or since a first crop gave back what it did not need."""
    settings = make_model("gemma3").config
    settings.layer_types = settings.layer_types[::-1]  # the layer without a window comes first
    model = transformers.Gemma3ForCausalLM(settings).eval()
    tokens = make_prompt(200, batch_size=1)["input_ids"]
    with make_cache(model) as cache, torch.no_grad():
        theirs = model(input_ids=tokens).logits[:, 185:]
        if is_late:
            model(input_ids=tokens[:, :130], past_key_values=cache)
        cache.layers[1].activate_past_recording()
        model(input_ids=tokens[:, cache.get_seq_length() :], past_key_values=cache)
        if not is_late:
            cache.crop(-10)
        with pytest.raises(RuntimeError, match="crop to 100 tokens needs those from 31 on"):
            cache.crop(100 - cache.get_seq_length())
        cache.crop(185 - cache.get_seq_length())  # nothing was forgotten by the one before
        ours = model(input_ids=tokens[:, 185:], past_key_values=cache).logits
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_selectors_that_name_no_block():
    model, prompt = make_model("llama"), make_prompt(100, batch_size=1)
    with make_cache(model, selector=lambda q, layer, pool: torch.full((1, 2, 1), 99)) as cache:
        with pytest.raises(ValueError, match="99"):
            generate(model, prompt, 3, past_key_values=cache)


def test_attention_weights_that_a_model_would_leave_out():
    """OPT's layers do not say that they are asked for."""
    sizes = {"hidden_size": 32, "ffn_dim": 32, "word_embed_proj_dim": 32}
    settings = transformers.OPTConfig(
        vocab_size=89, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0, **sizes
    )
    model, prompt = transformers.OPTForCausalLM(settings).eval(), make_prompt(40)
    with make_cache(model) as cache, pytest.raises(PenstockError, match="output_attentions"):
        generate(model, prompt, 4, past_key_values=cache, output_attentions=True)


def test_drafts_on_a_cache_that_holds_tokens():
    model, prompt = make_model("llama"), make_prompt(40, batch_size=1)
    with make_cache(model) as cache:
        sequences = generate(model, prompt, 4, past_key_values=cache).sequences
        for options in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": model}):
            with pytest.raises(ValueError, match=f"{next(iter(options))} is set.* 43 tokens"):
                generate(model, {"input_ids": sequences}, 4, past_key_values=cache, **options)


def test_a_prompt_of_another_text_than_the_call_before():
    model, prompt = make_model("llama"), make_prompt(40, num_padding=0)
    more = make_prompt(4, num_padding=0)["input_ids"]
    with make_cache(model, "1MiB") as cache:
        said = generate(model, prompt, 4, past_key_values=cache).sequences
        for place in (0, 39, 42):  # of the prompt, and of what was made
            tokens = torch.cat([said, more], 1)
            tokens[1, place] += 1
            with pytest.raises(
                ValueError, match=rf"what the cache holds at token {place}; .*reset"
            ):
                generate(model, {"input_ids": tokens}, 4, past_key_values=cache)
        tokens[:, :41] = torch.cat([said, more], 1)[:, :41]
        cache.crop(-2)  # an answer that is begun again
        expected = generate(model, {"input_ids": tokens}, 4)
        ours = generate(model, {"input_ids": tokens}, 4, past_key_values=cache)
        assert_same(ours, expected)
        cache.batch_select_indices(torch.tensor([1]))
        with pytest.raises(ValueError, match="what the cache holds at token 0"):
            generate(model, {"input_ids": ours.sequences[:1]}, 4, past_key_values=cache)
        some = {"input_ids": torch.cat([ours.sequences[1:], more[:1]], 1)}
        expected = generate(model, some, 4)
        assert_same(generate(model, some, 4, past_key_values=cache), expected)
        cache.reset()
        assert_same(generate(model, prompt, 4, past_key_values=cache), generate(model, prompt, 4))


def test_a_prompt_of_another_text_after_a_beam_search():
    model, prompt = make_model("llama"), make_prompt(40, num_padding=0)
    with make_cache(model, "1MiB") as cache:
        generate(model, prompt, 4, past_key_values=cache, num_beams=2)
        cache.batch_select_indices(torch.tensor([0, 2]))
        other = {"input_ids": make_prompt(60)["input_ids"].flip(1)}
        with pytest.raises(ValueError, match="what the cache holds at token 0"):
            generate(model, other, 4, past_key_values=cache)


def test_embeddings_of_tokens_that_the_cache_holds_already():
    model, prompt = make_model("llama"), make_prompt(40)
    table, mask = model.get_input_embeddings(), prompt["attention_mask"]
    with make_cache(model) as cache, torch.no_grad():
        some = {"inputs_embeds": table(prompt["input_ids"]), "attention_mask": mask}
        ours = generate(model, some, 4, past_key_values=cache)
        with pytest.raises(ValueError, match=r"40 tokens and the cache holds 43.*reset\(\)"):
            generate(model, some, 4, past_key_values=cache)
        tokens = torch.cat([prompt["input_ids"], ours.sequences], 1)
        mask = torch.cat([mask, torch.ones(2, 4, dtype=mask.dtype)], 1)
        more = {"inputs_embeds": table(tokens), "attention_mask": mask}
        expected = generate(model, more, 4)
        assert_same(generate(model, more, 4, past_key_values=cache), expected)


def test_a_model_that_leaves_its_cache():
    settings = transformers.Phi3Config(
        vocab_size=89,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        original_max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=1,
    )
    model = transformers.Phi3ForCausalLM(settings).eval()
    with make_cache(model) as cache:
        generate(model, make_prompt(40, batch_size=1), 9, past_key_values=cache)
    for length in (60, 100):
        with make_cache(model) as cache, pytest.raises(PenstockError, match="left past_key_values"):
            generate(model, make_prompt(length, batch_size=1), 9, past_key_values=cache)


@pytest.mark.parametrize("block_tokens", ["64", 2.5, True])
def test_blocks_of_no_number(block_tokens):
    with pytest.raises(TypeError, match="must be a whole number: pass an int"):
        penstock.kv.cache(make_model("llama"), device_memory="1MiB", block_tokens=block_tokens)


def test_selectors_of_other_caches_and_classes():
    model = make_model("llama")
    with pytest.raises(TypeError, match="selector is the class Nosa; pass an object"):
        make_cache(model, selector=penstock.kv.Nosa)
    selector = penstock.kv.Nosa(share=0.5)
    for batch_size in (2, 1):
        with make_cache(model, "1MiB", selector=selector) as cache:
            prompt = make_prompt(80, batch_size=batch_size)
            if batch_size == 2:
                generate(model, prompt, 2, past_key_values=cache)
                continue
            with pytest.raises(ValueError, match="make a selector for each cache"):
                generate(model, prompt, 2, past_key_values=cache)


@pytest.mark.parametrize("setting", ["use_cache", "prompt_lookup_num_tokens"])
def test_a_configuration_that_is_given_by_place(setting: str):
    model, prompt = make_model("llama"), make_prompt(40, batch_size=1)
    config = transformers.GenerationConfig(max_new_tokens=4, pad_token_id=0)
    setattr(config, setting, False if setting == "use_cache" else 4)
    with make_cache(model, "1MiB") as cache:
        sequences = generate(model, prompt, 4, past_key_values=cache).sequences
        with pytest.raises(ValueError, match=setting):
            model.generate(sequences, config, past_key_values=cache)


def test_a_model_without_generate_and_one_that_cannot_be_changed(monkeypatch: pytest.MonkeyPatch):
    model, prompt = make_model("llama").model, make_prompt(40)
    with torch.inference_mode():
        expected = model(**prompt)[0]
        with make_cache(model) as cache:
            torch.testing.assert_close(model(**prompt, past_key_values=cache)[0], expected)
    assert model.config._attn_implementation == "sdpa"
    monkeypatch.setattr(type(model), "set_attn_implementation", lambda self, name: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            make_cache(model)
    monkeypatch.undo()
    with make_cache(model):
        assert model.config._attn_implementation == "penstock_kv"
    assert model.config._attn_implementation == "sdpa"


def test_models_that_share_a_configuration():
    one, prompt = make_model("llama"), make_prompt(40)
    other = type(one)(one.config).eval()
    expected = generate(other, prompt, 4)
    with make_cache(other) as cache:
        make_cache(one).close()
        assert_same(generate(other, prompt, 4, past_key_values=cache), expected)
    assert one.config._attn_implementation == "sdpa"
