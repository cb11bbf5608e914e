"""The Llama of the LoRA benchmark, stock and with fused layers, and its batches."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import torch

import penstock


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A Llama with random weights from seed 0; an MLP 2.75 times as wide as it."""

    hidden: int = 1024
    layers: int = 4
    heads: int = 16
    vocab: int = 8192

    def __str__(self) -> str:
        return f"Llama of {self.layers} layers, hidden {self.hidden}"

    @property
    def flags(self) -> list[str]:
        """Options of a script that `add_flags` has prepared."""
        fields = dataclasses.asdict(self)
        return [text for name, value in fields.items() for text in (f"--{name}", str(value))]

    def build(self, device: str = "cpu") -> Any:
        """Build the base: fp32 on the CPU, bf16 on a GPU."""
        import transformers

        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 11 // 4,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            max_position_embeddings=8192,
            use_cache=False,
        )
        model: Any = transformers.LlamaForCausalLM(config)
        return model.to(device, torch.float32 if device == "cpu" else torch.bfloat16)

    def batch(self, *, rows: int, length: int, device: str = "cpu", seed: int = 1) -> Any:
        """Return random tokens, `(rows, length)`, as inputs and labels."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(1, self.vocab, (rows, length), generator=generator).to(device)
        return {"input_ids": tokens, "labels": tokens.clone()}


def add_flags(parser: Any) -> None:
    """Give a parser the options of a model."""
    for field in dataclasses.fields(Model):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)


def model_of(options: Any) -> Model:
    """Return the model that a command line names."""
    return Model(**{each.name: getattr(options, each.name) for each in dataclasses.fields(Model)})


def lora_config(*, rank: int, dropout: float) -> Any:
    """Return PEFT's configuration: all linear layers but the head."""
    from peft import LoraConfig

    return LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        init_lora_weights=False,  # as after some steps: B is not 0
    )


def with_adapter(base: Any, *, rank: int, dropout: float, fused: bool) -> Any:
    """Return PEFT's model of a base, in training mode; `fused` takes `penstock.lora`'s layers."""
    from peft import get_peft_model

    torch.manual_seed(1)
    model = get_peft_model(base, lora_config(rank=rank, dropout=dropout))
    if fused:
        penstock.lora.fuse(model)
    return model.train()


def base_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of a model's weights without those of adapters, each storage once."""
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for name, each in model.named_parameters()
        if "lora_" not in name
    }
    return sum(storages.values())


def live_base_bytes(base: torch.nn.Module) -> int:
    """Return the bytes of all live tensors that have a shape of the base's matrices.

    That is `base_bytes` but for vectors, once for each copy of the base in the process. Tensors of
    other classes than models have, such as fake ones, may be without memory and are not looked at.
    """
    shapes = {each.shape for name, each in base.named_parameters() if "lora_" not in name}
    shapes = {shape for shape in shapes if len(shape) == 2}
    gc.collect()
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in gc.get_objects()
        if type(each) in (torch.Tensor, torch.nn.Parameter)
        and each.shape in shapes
        and not each.is_meta
    }
    return sum(storages.values())
