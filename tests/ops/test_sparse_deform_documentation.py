"""Examples of sparse products and deformable convolutions run: of the page and of docstrings."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ops.md"


@pytest.mark.parametrize("name", ["product_pattern", "deform_conv2d"])
def test_the_examples_of_the_page_run(name: str):
    found = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    examples = [each for each in found if f"import {name}" in each]
    assert examples
    for example in examples:
        exec(example, {"__name__": "page"})


@pytest.mark.parametrize("module", ["sparse._spgemm", "deform._deform"])
def test_the_examples_of_docstrings_run(module: str):
    of = importlib.import_module(f"penstock.ops.{module}")
    failed, attempted = doctest.testmod(of, extraglobs={"torch": torch})
    assert attempted >= 2 and not failed
