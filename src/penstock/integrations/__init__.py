"""Penstock inside other libraries: one module for each, which loads that library on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.integrations import pyg, transformers

__all__ = ["pyg", "transformers"]


def __getattr__(name: str) -> Any:
    """Load an integration on first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module 'penstock.integrations' has no attribute {name!r}")
    return import_module(f"penstock.integrations.{name}")


def __dir__() -> list[str]:
    return sorted(__all__)
