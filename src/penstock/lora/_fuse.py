"""`fuse`: a model of PEFT whose LoRA layers are computed by `penstock.lora`, and the way back."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from penstock.compat.packages import import_package
from penstock.tables import Report

if TYPE_CHECKING:
    from penstock.lora._fused_layer import FusedLayer

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=torch.nn.Module)


@dataclasses.dataclass(frozen=True)
class FuseReport(Report, title="fused LoRA layers"):
    """Report of which LoRA layers of a model are fused, and of why others are not.

    Attributes:
        fused: Names of the layers whose product and adapters are one operator.
        added: By name of a layer why its base is called as it is; its adapters alone are added by
            the operator.
        stock: By name of a layer why calls of it are PEFT's.
    """

    fused: tuple[str, ...]
    added: Mapping[str, str]
    stock: Mapping[str, str]

    def _rows(self) -> list[tuple[str, object]]:
        """Return the numbers of layers, and how many layers have each reason."""
        rows: list[tuple[str, object]] = [("num_fused", len(self.fused))]
        for name, reasons in (("num_added", self.added), ("num_stock", self.stock)):
            rows.append((name, len(reasons)))
            rows += [
                (f"{number} because", reason)
                for reason, number in Counter(reasons.values()).most_common()
            ]
        return rows


def fuse(peft_model: Model) -> Model:
    """Have the LoRA layers of a PEFT model computed by `penstock.lora.linear`, in place.

    Dropout masks are made again in the backward pass instead of stored, and a layer keeps its
    input and the product of rank r (LoRAFusion, arXiv:2510.00206, section 4). The model stays a
    `PeftModel` with the same parameters and the same state dict: adapters are saved, loaded, added,
    merged, set and disabled by PEFT as before, and layers that a later adapter brings are fused as
    well. Layers are PEFT's where an adapter is a variant of LoRA (DoRA and others), a submodule is
    replaced or has hooks, or a layer is no `Linear`; `fuse_report` names them. Hooks that torch
    calls for all modules do not see the submodules of a fused layer.

    `adapter_names` is accepted in training as PEFT accepts it in inference: a list with the name of
    an adapter for each sample, `"__base__"` for none. A sample is what the first dimension of a
    layer's input counts, as in PEFT: models whose layers get `(time, batch, features)` must not be
    given names. `model.base_model.set_adapter([...])` makes several adapters trainable. Under
    gradient checkpointing a layer gets the adapters of its first pass again; what cannot be told is
    refused. `torch.compile` cuts its graph where there are names.

    With dropout each call of a layer draws a seed from torch's default generator on the CPU, also
    on a GPU, so `torch.manual_seed` repeats a run; the masks are others than those of PEFT, and
    other ones in each process of `torch.distributed`. In eval mode the results are PEFT's.

    Example:
        >>> from peft import LoraConfig, get_peft_model
        >>> layers = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU())
        >>> model = fuse(get_peft_model(layers, LoraConfig(target_modules=["0"], r=4)))
        >>> fuse_report(model).fused
        ('base_model.model.0',)

    Args:
        peft_model: A model that `peft.get_peft_model` or `PeftModel.from_pretrained` returned, with
            LoRA. A fused one stays as it is.

    Returns:
        The same model.

    Raises:
        ImportError: PEFT is not installed.
        TypeError: The model is not one of PEFT with LoRA.
        ValueError: None of its LoRA layers is a `Linear`.
    """
    from penstock.lora import _fused_model

    tuner = _tuner_of(peft_model)
    if not any(_is_candidate(module) for module in peft_model.modules()):
        raise ValueError(
            "peft_model has no LoRA layer of PEFT's class Linear, so nothing can be fused; give "
            "LoraConfig target_modules that are torch.nn.Linear"
        )
    is_new = not isinstance(tuner, _fused_model.FusedLoraModel)
    tuner.__class__ = _fused_model.FusedLoraModel
    _fused_model.fuse_layers(peft_model)
    if is_new:
        report = fuse_report(peft_model)
        logger.info(
            "LoRA layers: %d fused, %d added to their base, %d left to PEFT",
            *map(len, (report.fused, report.added, report.stock)),
        )
    return peft_model


def unfuse(peft_model: Model) -> Model:
    """Have the LoRA layers of a fused model computed by PEFT again, in place.

    Example:
        >>> from peft import LoraConfig, get_peft_model
        >>> layers = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU())
        >>> model = fuse(get_peft_model(layers, LoraConfig(target_modules=["0"], r=4)))
        >>> fuse_report(unfuse(model)).fused
        ()

    Args:
        peft_model: A model of PEFT with LoRA. One that is not fused stays as it is.

    Returns:
        The same model.

    Raises:
        ImportError: PEFT is not installed.
        TypeError: The model is not one of PEFT with LoRA.
    """
    _require_peft()
    from peft.tuners.lora.model import LoraModel

    from penstock.lora import _fused_model

    tuner = _tuner_of(peft_model)
    if isinstance(tuner, _fused_model.FusedLoraModel):
        tuner.__class__ = LoraModel  # pyright: ignore[reportAttributeAccessIssue]
        _fused_model.unfuse_layers(peft_model)
    return peft_model


def fuse_report(peft_model: torch.nn.Module) -> FuseReport:
    """Report which LoRA layers of a model are fused as it now is, with all of its adapters.

    Each call of a layer decides anew, so hooks that are added later show in a later report.
    Parameters that FSDP has sharded between two steps are whole within one: report before sharding.

    Example:
        >>> from peft import LoraConfig, get_peft_model
        >>> layers = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU())
        >>> model = get_peft_model(layers, LoraConfig(target_modules=["0"], r=4))
        >>> fuse_report(model).to_dict()["stock"]
        {'base_model.model.0': 'the layer is not fused'}

    Args:
        peft_model: A model of PEFT with LoRA.

    Returns:
        The report.

    Raises:
        ImportError: PEFT is not installed.
        TypeError: The model is not one of PEFT with LoRA.
    """
    _require_peft()
    from peft.tuners.lora.layer import LoraLayer, MultiheadAttention

    from penstock.lora._fused_layer import FusedLayer, find_base_obstacle

    _tuner_of(peft_model)
    fused: list[str] = []
    added: dict[str, str] = {}
    stock: dict[str, str] = {}
    inner: set[torch.nn.Module] = set()
    for name, module in peft_model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        if isinstance(module, MultiheadAttention):
            inner.update(module.base_layer.modules())
        if module in inner:
            stock[name] = "PEFT's MultiheadAttention has it merged, and does not call it"
        elif not isinstance(module, FusedLayer):
            stock[name] = _describe_stock(module)
        elif (reason := _find_reason(module)) is not None:
            stock[name] = reason
        elif (reason := find_base_obstacle(module.base_layer)) is not None:
            added[name] = reason
        else:
            fused.append(name)
    return FuseReport(tuple(fused), added, stock)


def _require_peft() -> None:
    import_package("peft", "penstock.lora, which fuses the adapters of PEFT,")


def _tuner_of(peft_model: object) -> Any:
    """Return PEFT's LoRA model within a model."""
    _require_peft()
    from peft import PeftModel
    from peft.tuners.lora.model import LoraModel

    from penstock.lora._fused_model import FusedLoraModel

    tuner = peft_model.base_model if isinstance(peft_model, PeftModel) else None
    if type(tuner) not in (LoraModel, FusedLoraModel):
        raise TypeError(f"peft_model is a {type(peft_model).__name__}{_describe_other(peft_model)}")
    return tuner


def _describe_other(model: Any) -> str:
    """Return the rest of a message on a model that is none of PEFT with LoRA, with the remedy."""
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    accepted = "accepted is what peft.get_peft_model returns for a LoraConfig"
    if isinstance(model, PeftModel):
        kinds = sorted({getattr(c.peft_type, "value", "?") for c in model.peft_config.values()})
        return (
            f" with the method {', '.join(kinds)}; {accepted}: train this one without fuse, or "
            "make its adapter with a LoraConfig"
        )
    inner = getattr(model, "module", None) or getattr(model, "_orig_mod", None)
    if isinstance(inner, PeftModel):
        return f" around a {type(inner).__name__}; {accepted}: fuse that one before it is wrapped"
    is_module = isinstance(model, torch.nn.Module)
    if is_module and any(isinstance(each, BaseTunerLayer) for each in model.modules()):
        return (
            f" in which adapters were put without a PeftModel (add_adapter, load_adapter, "
            f"inject_adapter_in_model); {accepted}: load the base without adapters and give it to "
            "peft.get_peft_model(base, config), or to PeftModel.from_pretrained(base, folder) for "
            "adapters that save_pretrained(folder) has written"
        )
    return (
        f"; {accepted}, before it is wrapped in DistributedDataParallel or torch.compile: give the "
        "model to that function first"
    )


def _is_candidate(module: torch.nn.Module) -> bool:
    from penstock.lora._fused_layer import FusedLayer, find_fused_type

    return isinstance(module, FusedLayer) or find_fused_type(type(module)) is not None


def _describe_stock(module: Any) -> str:
    from penstock.lora._fused_layer import find_fused_type

    if find_fused_type(type(module)) is None:
        return f"the layer is PEFT's {type(module).__name__}"
    if "forward" in module.__dict__:
        return "the layer has a forward of its own"
    return "the layer is not fused"


def _find_reason(layer: FusedLayer) -> str | None:
    """Return the reason for which an adapter of a layer is PEFT's; None without one."""
    from penstock.lora._fused_layer import find_adapter_obstacle

    reasons = (find_adapter_obstacle(layer, name) for name in layer.lora_A)
    return next((reason for reason in reasons if reason is not None), None)
