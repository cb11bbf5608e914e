"""The examples of the guide, of README and of the docstrings run."""

from __future__ import annotations

import doctest
import re
import warnings
from pathlib import Path

import pytest

from penstock.batching.dynamic import _batcher, _schedule, _typed_graph
from penstock.batching.packing import _bins, _bound, _completion, _first_fit
from penstock.batching.sampler import _byte_model, _packing, _sampler

REPOSITORY = Path(__file__).resolve().parents[2]


def blocks(page, containing=""):
    found = re.findall(r"^```python\n(.*?)^```", (REPOSITORY / page).read_text(), re.S | re.M)
    return [block for block in found if containing in block]


def test_the_examples_of_the_guide_run_one_after_the_other(capsys):
    examples = blocks("docs/batching.md")
    assert len(examples) == 4
    exec("\n".join(examples), {"__name__": "guide"})
    said = capsys.readouterr().out
    assert "byte model" in said and "lower bound" in said


def test_the_readme_example_runs(capsys):
    (example,) = blocks("README.md", "DynamicBatcher")
    exec(example, {"__name__": "readme"})
    assert "torch.Size([8, 16])" in capsys.readouterr().out


@pytest.mark.parametrize(
    "module",
    [
        *(_byte_model, _packing, _sampler),
        *(_bins, _bound, _completion, _first_fit),
        *(_batcher, _schedule, _typed_graph),
    ],
    ids=lambda module: module.__name__.rpartition(".")[2],
)
def test_the_examples_of_docstrings_run(module):
    import numpy
    import torch

    given = {**vars(module), "np": numpy, "torch": torch}
    with warnings.catch_warnings():
        failed, attempted = doctest.testmod(module, extraglobs=given)
    assert attempted > 0 and failed == 0
