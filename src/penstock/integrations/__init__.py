"""Penstock inside other libraries: one module for each, which loads that library on first use."""

from typing import TYPE_CHECKING

from penstock._lazy import load_lazily

if TYPE_CHECKING:
    from penstock.integrations import pyg, transformers

__all__ = ["pyg", "transformers"]

__getattr__, __dir__ = load_lazily(__name__)
