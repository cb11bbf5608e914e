"""Caches that begin with a saved prefix: in other processes, and of other models and prompts."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import penstock
from fork_servers import find_python
from kv_models import (
    TOLERANCE,
    assert_same,
    cache_bytes,
    generate,
    make_model,
    make_prompt,
    transformers,
)
from penstock.errors import PenstockError, PrefixFileError

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCK, NUM_PROMPT, NUM_FIRST, NUM_NEW = 16, 300, 10, 14
KINDS = ("llama", "mistral", "gemma3", "gpt2", "t5")


def make_cache(model: Any, budget: int | str = "64KiB", **options: Any) -> Any:
    return penstock.kv.cache(model, device_memory=budget, block_tokens=BLOCK, **options)


def go_on(kind: str, prompt: dict[str, Any], sequences: torch.Tensor) -> dict[str, Any]:
    """What to ask `generate` for, to go on from sequences."""
    mask = prompt["attention_mask"]
    if kind == "t5":
        own = {"decoder_input_ids": sequences, "decoder_attention_mask": torch.ones_like(sequences)}
        return {**prompt, **own}
    more = torch.ones(len(mask), sequences.shape[1] - mask.shape[1], dtype=mask.dtype)
    return {"input_ids": sequences, "attention_mask": torch.cat([mask, more], 1)}


@functools.cache
def saved_prefix(kind: str) -> tuple[dict[str, Any], torch.Tensor, bytes]:
    """The prompt that goes on from some generated tokens, these, and a file of their prefix."""
    model, prompt = make_model(kind), make_prompt(NUM_PROMPT)
    with make_cache(model) as cache, tempfile.TemporaryDirectory() as directory:
        sequences = generate(model, prompt, NUM_FIRST, past_key_values=cache).sequences
        asked = go_on(kind, prompt, sequences)
        path = Path(directory) / "prefix"
        cache.save(path, tokens=sequences, attention_mask=asked["attention_mask"])
        return asked, sequences, path.read_bytes()


def save(kind: str, path: Path) -> tuple[Any, dict[str, Any], torch.Tensor]:
    """Save a prefix of some generated tokens; return the model, the prompt and the tokens."""
    asked, sequences, file = saved_prefix(kind)
    path.write_bytes(file)
    return make_model(kind), dict(asked), sequences


@pytest.fixture(scope="module")
def other_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of two processes that went on at once from one file for each model."""
    directory = tmp_path_factory.mktemp("prefixes")
    for kind in KINDS:
        _, asked, _ = save(kind, directory / f"{kind}.kv")
        torch.save({"inputs": asked, "num_tokens": NUM_NEW}, directory / f"{kind}.pt")
    search = [str(Path(penstock.__file__).parents[1]), str(Path(__file__).parent)]
    processes = [
        subprocess.Popen(
            [
                find_python("libraries"),
                search[1] + "/prefix_process.py",
                str(directory),
                name,
                *KINDS,
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(search), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("first", "second")
    ]
    for process in processes:
        _, said = process.communicate(timeout=280)
        assert process.returncode == 0, said
    assert len(os.listdir(directory)) == 4 * len(KINDS)
    return directory


@pytest.mark.parametrize("kind", KINDS)
def test_another_process_goes_on_as_dynamic_cache_does(kind: str, other_processes: Path):
    model, prompt = make_model(kind), make_prompt(NUM_PROMPT)
    theirs = generate(model, prompt, NUM_FIRST + NUM_NEW)
    theirs.logits = theirs.logits[NUM_FIRST:]
    file_bytes = (other_processes / f"{kind}.kv").stat().st_size
    for name in ("first", "second"):
        ours = torch.load(other_processes / f"{kind}.{name}")
        assert_same(SimpleNamespace(**ours), theirs)
        assert torch.equal(ours["tokens"], theirs.sequences[:, : ours["tokens"].shape[1]])
        opened, report = ours["opened"], ours["report"]
        assert (opened["read_bytes"], opened["num_misses"]) == (0, 0)
        assert 0 < opened["prefix_bytes"] < file_bytes
        record_bytes = BLOCK * 64 * 4
        assert report["num_misses"] > 0
        assert report["read_bytes"] == report["num_misses"] * record_bytes
        budget = cache_bytes(model, 320) // 16
        assert report["peak_device_bytes"] <= budget + report["tail_bytes"]


@pytest.mark.parametrize("kind", ["llama", "gemma3", "t5"])
def test_beams_go_on_from_a_prefix(kind: str, tmp_path: Path):
    model, asked, _ = save(kind, tmp_path / "prefix")
    options = {"num_beams": 3, "output_logits": False}
    theirs = generate(model, asked, 12, **options)
    with make_cache(model, prefix=tmp_path / "prefix") as cache:
        cache.batch_repeat_interleave(3)
        ours = generate(model, asked, 12, past_key_values=cache, **options)
        assert torch.equal(ours.sequences, theirs.sequences)


def test_a_cache_that_dies_closes_the_file(tmp_path: Path):
    model, _, _ = save("llama", tmp_path / "prefix")
    cache = make_cache(model, prefix=tmp_path / "prefix")
    is_open = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    assert str(tmp_path / "prefix") in is_open
    del cache  # without the garbage collector
    is_open = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    assert str(tmp_path / "prefix") not in is_open
    assert "generate" not in model.__dict__


def test_several_turns_saved_in_between(tmp_path: Path):
    model, asked, sequences = save("gemma3", tmp_path / "prefix")
    for turn in range(3):
        theirs = generate(model, asked, 8)
        with make_cache(model, prefix=tmp_path / "prefix") as cache:
            ours = generate(model, asked, 8, past_key_values=cache)
            assert torch.equal(ours.sequences, theirs.sequences)
            sequences = ours.sequences
            mask = torch.cat([asked["attention_mask"], torch.ones(2, 8, dtype=torch.int64)], 1)
            cache.save(tmp_path / "prefix", tokens=sequences, attention_mask=mask)
        new = torch.full((2, 30), 7 + turn)
        asked = {
            "input_ids": torch.cat([sequences, new], 1),
            "attention_mask": torch.cat([mask, torch.ones_like(new)], 1),
        }
    assert os.listdir(tmp_path) == ["prefix"]


def test_a_prefix_of_a_prefill_and_crop(tmp_path: Path):
    model, tokens = make_model("llama"), make_prompt(100, batch_size=1)["input_ids"]
    with make_cache(model) as cache, torch.no_grad():
        model(input_ids=tokens[:, :90], past_key_values=cache)
        cache.save(tmp_path / "prefix", tokens=tokens)
    whole = model(input_ids=tokens).logits
    with make_cache(model, prefix=tmp_path / "prefix") as cache, torch.no_grad():
        assert torch.equal(cache.prefix_tokens, tokens[:, :90])
        rest = model(input_ids=tokens[:, 90:], past_key_values=cache).logits
        torch.testing.assert_close(rest, whole[:, 90:], atol=1e-4, rtol=1e-4)
        cache.crop(-60)
        assert torch.equal(cache.prefix_tokens, tokens[:, :40])
        rest = model(input_ids=tokens[:, 40:], past_key_values=cache).logits
        torch.testing.assert_close(rest, whole[:, 40:], atol=1e-4, rtol=1e-4)
        cache.reset()
        assert cache.prefix_tokens is None
        again = model(input_ids=tokens, past_key_values=cache).logits
        torch.testing.assert_close(again, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("selector", ["nosa", "window", "accumulated"])
def test_selectors_go_on_as_after_a_prefill(selector: str, tmp_path: Path):
    model, tokens = make_model("llama"), make_prompt(500, batch_size=1)["input_ids"]
    outs = []
    with torch.no_grad():
        with make_cache(model, "128KiB") as cache:
            model(input_ids=tokens, past_key_values=cache)
            cache.save(tmp_path / "prefix", tokens=tokens)
        for prefix in (None, tmp_path / "prefix"):
            with make_cache(model, "128KiB", selector=selector, prefix=prefix) as cache:
                if prefix is None:
                    model(input_ids=tokens, past_key_values=cache)
                steps = torch.cat([tokens, torch.tensor([[5]])], 1)
                outs.append(generate(model, {"input_ids": steps}, 20, past_key_values=cache))
    assert_same(*outs)


def change_one(model: Any) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data[3, 5] = torch.nextafter(weight.data[3, 5], torch.tensor(1.0))


OTHERS = {
    "weight": (change_one, r"numbers of model\.layers\.1\.mlp\.up_proj\.weight are others"),
    "dtype": (lambda model: model.to(torch.bfloat16), "was float32 .* here it is bfloat16"),
    "config": (
        lambda model: setattr(model.config, "rms_norm_eps", 0.1),
        "had rms_norm_eps=1e-06, and here it is 0.1",
    ),
}


@pytest.mark.parametrize("change", OTHERS)
def test_another_model(change: str, tmp_path: Path):
    path = tmp_path / "prefix"
    model, _, _ = save("llama", path)
    before = model.config._attn_implementation
    OTHERS[change][0](model)
    with pytest.raises(PrefixFileError, match=OTHERS[change][1]) as caught:
        make_cache(model, prefix=path)
    assert str(path) in str(caught.value) and "make the prefix again" in str(caught.value)
    assert model.config._attn_implementation == before
    with pytest.raises(PrefixFileError, match=r"made by a LlamaForCausalLM, .* Qwen3ForCausalLM"):
        make_cache(make_model("qwen3"), prefix=path)


def test_another_adapter(tmp_path: Path):
    """All of a model's adapters are among its parameters, whichever is active."""
    peft = pytest.importorskip("peft")
    model, prompt = make_model("llama"), make_prompt(80)
    settings = peft.LoraConfig(target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, settings).eval()
    adapted.add_adapter("second", settings)
    with make_cache(model) as cache, torch.inference_mode():
        adapted(**prompt, past_key_values=cache)
        cache.save(tmp_path / "prefix")
    make_cache(model, prefix=tmp_path / "prefix").close()
    with (
        adapted.disable_adapter(),
        pytest.raises(PrefixFileError, match=r"self_attn.k_proj were \[\['default'.* are off"),
    ):
        make_cache(model, prefix=tmp_path / "prefix")
    adapted.set_adapter("second")
    with pytest.raises(PrefixFileError, match=r"here they are \[\['second'"):
        make_cache(model, prefix=tmp_path / "prefix")
    adapted.set_adapter("default")
    with make_cache(model, prefix=tmp_path / "prefix") as cache, make_cache(model) as other:
        with torch.inference_mode():
            adapted(**prompt, past_key_values=other)
        adapted.set_adapter("second")
        for each in cache, other:
            with pytest.raises(PenstockError, match=r"active adapters of this Llama.* reset\(\)"):
                each.save(tmp_path / "second")
        other.reset()
        with torch.inference_mode():
            adapted(**prompt, past_key_values=other)
        other.save(tmp_path / "second")


def test_frequencies_that_follow_from_the_length_of_the_context(tmp_path: Path):
    """They are buffers of the model, and others in the one that saved than in a new one."""
    config = make_model("llama").config
    config.max_position_embeddings = 64
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    first, second = (transformers.LlamaForCausalLM(config).eval() for _ in range(2))
    second.load_state_dict(first.state_dict())
    tokens, stock = make_prompt(125, batch_size=1)["input_ids"], transformers.DynamicCache()
    with torch.inference_mode(), make_cache(first) as cache:
        for each in stock, cache:
            first(input_ids=tokens[:, :120], past_key_values=each)
        cache.save(tmp_path / "prefix")
        with make_cache(second, prefix=tmp_path / "prefix") as begun:
            ours = second(input_ids=tokens[:, 120:], past_key_values=begun).logits
        theirs = first(input_ids=tokens[:, 120:], past_key_values=stock).logits
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


def test_files_that_are_no_prefix_of_a_model(tmp_path: Path):
    path, model = tmp_path / "prefix", make_model("llama")
    path.write_text("a text")
    with pytest.raises(PrefixFileError, match="is no prefix file"):
        make_cache(model, prefix=path)
    pool = penstock.kv.BlockPool(device_memory="64KiB", block_tokens=BLOCK)
    pool.append(0, torch.rand(1, 2, 20, 32), torch.rand(1, 2, 20, 32))
    pool.save(path)
    pool.close()
    with pytest.raises(PrefixFileError, match="saved by a BlockPool without a model"):
        make_cache(model, prefix=path)


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_prompts_that_do_not_go_on_from_the_prefix(kind: str, tmp_path: Path):
    model, asked, sequences = save(kind, tmp_path / "prefix")
    name = "decoder_input_ids" if kind == "t5" else "input_ids"
    mask_name = "decoder_attention_mask" if kind == "t5" else "attention_mask"
    wrong = sequences.clone()
    wrong[1, 7] += 1
    mask = asked["attention_mask"].clone()
    mask[0, 2] = 0
    short = sequences[:, :-1]
    theirs = generate(model, asked, 5)
    with make_cache(model, prefix=tmp_path / "prefix") as cache:
        for changes, message in (
            ({name: wrong}, "differs from what the cache holds at token 7"),
            ({"attention_mask": mask}, "attention_mask differs from it at token 2"),
            ({name: short, mask_name: asked[mask_name][:, :-1]}, "at least one more token"),
        ):
            with pytest.raises(ValueError, match=message):
                generate(model, {**asked, **changes}, 5, past_key_values=cache)
        without = {key: each for key, each in asked.items() if key != "attention_mask"}
        with pytest.raises(ValueError, match="pass attention_mask= that begins"):
            generate(model, without, 5, past_key_values=cache)
        if kind == "t5":
            with pytest.raises(ValueError, match="names none to go on from"):
                generate(model, make_prompt(NUM_PROMPT), 5, past_key_values=cache)
            without = {key: each for key, each in asked.items() if key != mask_name}
            with pytest.raises(ValueError, match="pass decoder_attention_mask="):
                generate(model, without, 5, past_key_values=cache)
        assert torch.equal(
            copy.deepcopy(model).generate(
                **asked, max_new_tokens=5, do_sample=False, pad_token_id=0
            ),
            theirs.sequences,
        )
        assert torch.equal(
            generate(model, asked, 5, past_key_values=cache).sequences, theirs.sequences
        )
    assert "generate" not in model.__dict__


def test_tokens_that_are_not_those_of_the_cache(tmp_path: Path):
    model, prompt = make_model("llama"), make_prompt(40)
    with make_cache(model) as cache, torch.no_grad():
        with pytest.raises(ValueError, match="holds no tokens to save"):
            cache.save(tmp_path / "prefix")
        model(**prompt, past_key_values=cache)
        tokens = prompt["input_ids"]
        for wrong in (tokens[:, :-1], tokens[:1], tokens.float(), tokens[0]):
            with pytest.raises(
                ValueError, match=r"tokens must be whole numbers \(2, at least 40\)"
            ):
                cache.save(tmp_path / "prefix", tokens=wrong)
        with pytest.raises(ValueError, match="attention_mask must be"):
            cache.save(tmp_path / "prefix", tokens=tokens, attention_mask=tokens[:, :3])
        assert os.listdir(tmp_path) == []
        cache.close()
        with pytest.raises(PenstockError, match="closed"):
            cache.save(tmp_path / "prefix")
