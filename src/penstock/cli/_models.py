"""Models of `penstock plan`: a name, a configuration, a function, or a saved graph."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from penstock.cli._functions import frames_of_user, import_function
from penstock.cli._options import name_option, number_option
from penstock.compat.packages import import_package
from penstock.errors import GraphFileError, PenstockError

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from torch import nn

    from penstock.graph import StepGraph

# Published shapes, so that nothing is downloaded: the type of a configuration and its first sizes;
# those that are left out are its defaults.
_SIZES = {
    "gpt2": ("n_embd", "n_layer", "n_head"),
    "bert": ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    "t5": ("d_model", "d_kv", "d_ff", "num_layers", "num_heads"),
    "vit": (),
    "llama": (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "vocab_size", "max_position_embeddings"),
    ),
    "mistral": (),
}
_PUBLISHED = {
    "gpt2": ("gpt2",),
    "gpt2-medium": ("gpt2", 1024, 24, 16),
    "gpt2-large": ("gpt2", 1280, 36, 20),
    "gpt2-xl": ("gpt2", 1600, 48, 25),
    "bert-base": ("bert",),
    "bert-large": ("bert", 1024, 24, 16, 4096),
    "t5-small": ("t5",),
    "t5-base": ("t5", 768, 64, 3072, 12, 12),
    "t5-large": ("t5", 1024, 64, 4096, 24, 16),
    "t5-3b": ("t5", 1024, 128, 16384, 24, 32),
    "vit-base": ("vit",),
    "llama-7b": ("llama",),
    "llama-13b": ("llama", 5120, 13824, 40, 40),
    "llama-3-8b": ("llama", 4096, 14336, 32, 32, 8, 128256, 8192),
    "llama-70b": ("llama", 8192, 28672, 80, 64, 8),
    "mistral-7b": ("mistral",),
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    name: {"model_type": kind, **dict(zip(_SIZES[kind], sizes, strict=False))}
    for name, (kind, *sizes) in _PUBLISHED.items()
}
# The model that is trained for a type of configuration that names none ("architectures").
_TASKS = {
    "bert": "BertForMaskedLM",
    "t5": "T5ForConditionalGeneration",
    "vit": "ViTForImageClassification",
}


_OF_NAMES = "Of a model by name or configuration; default:"
_BATCH = 8


class ModelError(PenstockError):
    """A MODEL that names no model."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Training options of a model that comes from a name or a configuration, and of no other."""

    batch: Annotated[
        int | None,
        number_option(f"Samples of a batch. {_OF_NAMES} 8.", min=1, show_default=False),
    ] = None
    sequence: Annotated[
        int | None,
        number_option(
            f"Tokens of a sample. {_OF_NAMES} the model's longest, at most 1024.",
            min=1,
            show_default=False,
        ),
    ] = None
    optimizer: Annotated[
        Literal["adamw", "adam", "sgd"] | None,
        name_option(f"adamw, adam, or sgd (with momentum). {_OF_NAMES} adamw.", show_default=False),
    ] = None
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        name_option(
            f"Of parameters: float32, bfloat16, float16. {_OF_NAMES} float32.", show_default=False
        ),
    ] = None

    def refuse(self, source: str, kind: str) -> None:
        """Raise if one is given for a model that has its own."""
        names = (field.name for field in fields(ModelOptions))
        given = [f"--{name}" for name in names if getattr(self, name) is not None]
        if given:
            raise ModelError(
                f"{source} is {kind}, with a batch, an optimizer and a dtype of its own: leave out "
                f"{' and '.join(given)}, which are for models by name and configurations"
            )


def name_model(source: str) -> str:
    """Return the name of a model for titles: of a file its own, without folder and suffix."""
    return Path(source).name.removesuffix(".gz").removesuffix(".json")


def show_capture(
    source: str, options: ModelOptions, machine: str | None, save: Path | None, err: Console
) -> StepGraph:
    """Capture as `load_graph` does, for a machine, and save the graph; a spinner says so."""
    from penstock.graph import with_workspace
    from penstock.memory import machine as find_machine

    with err.status(f"Capturing a training step of {source}"):
        graph = load_graph(source, options)
        if machine is not None:
            graph = with_workspace(graph, find_machine(machine).device)
    if save is not None:
        graph.save(save)
    return graph


def load_graph(source: str, options: ModelOptions) -> StepGraph:
    """Capture the step of a model, or read a saved one.

    `source` is a name of `SHAPES`, a JSON file (a Transformers configuration or a saved step
    graph), or `module:function`, a function without arguments that returns model, optimizer, batch
    and perhaps the loss function.

    Raises:
        ModelError: `source` is none of these.
        CaptureError: The step cannot be captured.
        GraphFileError: A saved graph is damaged.
    """
    from penstock.graph import StepGraph, capture

    path = Path(source)
    if path.suffix in (".json", ".gz") or path.is_file():
        values = _read_json(path)
        if values is not None and "format" not in values:
            return capture(*_make_from_config(values, source, options))
        _check_kind(path, values)
        options.refuse(source, "a saved step graph")
        try:
            return StepGraph.load(path)
        except GraphFileError as error:
            raise GraphFileError(f"{path}: {error}") from error
    if ":" in source:
        options.refuse(source, "a function")
        return capture_function(source)
    if source in SHAPES:
        return capture(*_make_from_config(SHAPES[source], source, options))
    raise ModelError(
        f"{source!r} is no model: give one of {', '.join(SHAPES)}; or a JSON file with a "
        "Transformers configuration or a saved step graph; or module:function"
    )


def capture_function(source: str) -> StepGraph:
    """Capture a step from a function that returns (model, optimizer, batch) or (..., loss)."""
    from penstock.graph import capture

    try:
        function = import_function(source)
    except ValueError as error:
        raise ModelError(str(error)) from error
    with frames_of_user():
        parts = function()
    if not isinstance(parts, tuple) or len(parts) not in (3, 4):
        found = f"a tuple of {len(parts)}" if isinstance(parts, tuple) else type(parts).__name__
        raise ModelError(
            f"{source}() returned {found}: it must return a tuple of model, optimizer, batch and, "
            "if the model's output is not the loss, loss(output, batch)"
        )
    model, optimizer, batch, *rest = parts
    with frames_of_user():
        return capture(model, optimizer, batch, loss=rest[0] if rest else None)


def _check_kind(path: Path, values: Mapping[str, Any] | None) -> None:
    """Refuse a file of Penstock that holds another thing than a step graph, by its name."""
    kind = str(values["format"]).removeprefix("penstock-") if values is not None else ""
    if kind in ("plan", "partition"):
        raise ModelError(
            f"{path} is a {kind} and no step graph: give what --save-graph wrote, or the model"
        )


def _read_json(path: Path) -> Mapping[str, Any] | None:
    """Return the content of a file; None if it is compressed, as only graphs are."""
    try:
        data = path.read_bytes()
        values = None if data[:2] == b"\x1f\x8b" else json.loads(data)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ModelError(f"{path} is no JSON ({error})") from error
    if values is not None and not isinstance(values, dict):
        raise ModelError(f"{path} holds no configuration and no step graph")
    return values


def _make_from_config(
    values: Mapping[str, Any], source: str, options: ModelOptions
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Make model, optimizer and batch without memory."""
    import torch

    transformers: Any = import_package("transformers", "a model by its name")

    transformers.logging.set_verbosity_error()  # its warnings are about training, not planning
    values = dict(values)
    kind = values.pop("model_type", None)
    try:
        config = transformers.AutoConfig.for_model(kind, **values)
    except (ValueError, KeyError) as error:
        raise ModelError(
            f"{source} is no configuration that this version of transformers "
            f"({transformers.__version__}) has: its model_type is {kind!r}"
        ) from error
    config.use_cache = False
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    names = getattr(config, "architectures", None) or [_TASKS.get(str(kind), "")]
    make = getattr(transformers, names[0], None) if names[0] else None
    with torch.device("meta"):
        if make is not None:
            model = make(config)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config)
        model = model.to(getattr(torch, options.dtype or "float32")).train()
        batch = _make_batch(config, options)
    return model, _make_optimizer(options.optimizer or "adamw", model), batch


def _make_batch(config: Any, options: ModelOptions) -> dict[str, torch.Tensor]:
    import torch

    num_samples = options.batch or _BATCH
    if hasattr(config, "image_size"):
        side, channels = config.image_size, getattr(config, "num_channels", 3)
        dtype = getattr(torch, options.dtype or "float32")
        return {
            "pixel_values": torch.empty(
                num_samples, channels, side, side, dtype=dtype, device="cpu"
            ),
            "labels": torch.zeros(num_samples, dtype=torch.long, device="cpu"),
        }
    limits = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions"))
    longest = next((limit for limit in limits if limit), 1024)
    length = options.sequence or min(longest, 1024)
    shape = (num_samples, length)
    return {
        name: torch.zeros(shape, dtype=torch.long, device="cpu") for name in ("input_ids", "labels")
    }


def _make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    import torch

    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    make = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
    return make(model.parameters(), lr=1e-4, foreach=False)
