"""The documentation is true: its tables are compared, its examples run, its files exist."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

import penstock
from fork_servers import find_python
from penstock.unified.overrides.registry import OVERRIDES

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "src" / "penstock"


def blocks(page: str, containing: str = "") -> list[str]:
    """The Python examples of a page, in their order."""
    found = re.findall(r"^```python\n(.*?)^```", (REPOSITORY / page).read_text(), re.S | re.M)
    return [block for block in found if containing in block]


def run(source: str, directory: Path) -> str:
    search = [str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [find_python("libraries"), "-c", source],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, search))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_override_of_a_table_is_documented():
    """By its name, by what a user writes for it, or by another name of the same override."""
    page = (REPOSITORY / "docs" / "unified.md").read_text()
    table = page.partition("| operation | result |")[2].partition("everything else")[0]
    written = {"__getitem__": "u[index]", "__setitem__": "u[index] = rows", "__set__": "u.data = x"}
    shown = {
        override
        for func, override in OVERRIDES.items()
        if written.get(func.__name__, f"{func.__name__}(") in table
    }
    hidden = {override.__name__ for override in OVERRIDES.values() if override not in shown}
    assert hidden == {"_type_as"}  # `to` by another tensor


def test_the_examples_of_tables_run_one_after_the_other(store):
    pytest.importorskip("torch_geometric", reason="penstock[pyg] installs PyTorch Geometric")
    examples = blocks("docs/unified.md")
    assert len(examples) >= 6
    said = run("\n".join(examples), store)
    assert "rows gathered" in said and "sample" in said
    for path in store.iterdir():  # the fixture wants its directory back as it was
        path.unlink()


def test_the_readme_example_of_tables_runs(store):
    (example,) = blocks("README.md", containing="penstock.unify(")
    run(example, store)
    for path in store.iterdir():
        path.unlink()


def test_the_readme_examples_of_planned_steps_run(probed_store):
    (example,) = blocks("README.md", containing="penstock.capture(")
    run(example, probed_store)
    (example,) = blocks("README.md", containing="penstock.fit(")
    said = run(example.replace('store="/mnt/nvme"', f"store={str(probed_store)!r}"), probed_store)
    losses = [float(line) for line in said.splitlines()[:3]]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]


def test_the_examples_of_relational_graphs_run_one_after_the_other(tmp_path):
    examples = blocks("docs/rgnn.md")
    assert len(examples) >= 5
    # A compiled function reads its own source line for the plan, so the page becomes a file.
    script = tmp_path / "page.py"
    script.write_text("\n".join(examples))
    said = run(f"import runpy; runpy.run_path({str(script)!r})", tmp_path)
    assert "segment GEMM" in said and "page.py" in said


def test_the_readme_example_of_relational_graphs_runs(tmp_path):
    (example,) = blocks("README.md", containing="rgnn.compile")
    assert "torch.Size([100, 16])" in run(example, tmp_path)


def execute(source: str, directory: Path, monkeypatch, capsys) -> str:
    """Run examples in this process, which has imported what takes long to import."""
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    monkeypatch.chdir(directory)
    exec(source, {"__name__": "page"})
    return capsys.readouterr().out


def test_the_examples_of_adapters_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    examples = blocks("docs/lora.md")
    assert len(examples) >= 5
    said = execute("\n".join(examples), tmp_path, monkeypatch, capsys)
    assert "fused LoRA layers" in said and "finished, 5/5 steps" in said
    assert "lower bound" in said and "('summaries', 0, 512)" in said
    for name in ("short", "long"):
        assert (tmp_path / "adapters" / "latest" / name / "adapter_model.safetensors").exists()


def test_the_readme_example_of_adapters_runs(tmp_path, monkeypatch, capsys):
    (example,) = blocks("README.md", containing="penstock.lora.Jobs(")
    said = execute(example, tmp_path, monkeypatch, capsys)
    assert said.count("finished, 3/3 steps") == 2
    assert (tmp_path / "adapters" / "latest" / "rank-4" / "adapter_config.json").exists()


def test_the_examples_of_long_contexts_run_one_after_the_other(store, monkeypatch, capsys):
    examples = blocks("docs/kv.md")
    assert len(examples) == 3
    source = "\n".join(examples).replace('"/mnt/nvme', f'"{store}')
    said = execute(source, store, monkeypatch, capsys)
    assert "misses" in said and said.count("True") == 2 and "newest" in said
    assert [path.name for path in store.iterdir()] == ["prefix.kv"]
    (store / "prefix.kv").unlink()


def test_the_examples_of_the_io_model_run_one_after_the_other(tmp_path):
    examples = blocks("docs/iomodel.md")
    assert len(examples) == 3
    said = run("\n".join(examples), tmp_path)
    assert "two-pass" in said and "false lead" in said and "rows at a time" in said


def test_the_examples_of_attention_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    examples = blocks("docs/attention.md")
    assert len(examples) == 3
    said = execute("\n".join(examples), tmp_path, monkeypatch, capsys)
    assert "block-sparse attention" in said and "torch.Size([8, 1024])" in said


def test_the_examples_of_traversals_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    examples = blocks("docs/traversal.md")
    assert len(examples) >= 5
    said = execute("\n".join(examples), tmp_path, monkeypatch, capsys)
    assert "frontier edges" in said and "True, True" in said


def test_the_readme_example_of_traversals_runs(tmp_path, monkeypatch, capsys):
    (example,) = blocks("README.md", containing="split_khop")
    for name, values in (("indptr", [0, 1, 2]), ("indices", [1, 0])):
        np.save(tmp_path / f"{name}.npy", np.array(values))
    seeds = "import torch\nseeds = many_seeds = torch.tensor([0])\n"
    said = execute(f"{seeds}{example}print(len(list(parts)))", tmp_path, monkeypatch, capsys)
    assert said == "1\n"


def test_the_examples_of_operators_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    examples = blocks("docs/ops.md")
    assert len(examples) >= 3
    said = execute("\n".join(examples), tmp_path, monkeypatch, capsys)
    assert "numerator_degree=5" in said and "torch.Size([2, 8, 20, 20])" in said


def test_the_examples_of_spectra_run_one_after_the_other(store, monkeypatch, capsys):
    examples = blocks("docs/spectral.md")
    assert len(examples) == 3
    source = "\n".join(examples).replace('"/mnt/nvme', f'"{store}')
    said = execute(source, store, monkeypatch, capsys)
    assert "1997., 1998., 1999., 2000." in said and "bytes read" in said
    assert "torch.Size([3, 32])" in said


def section(page: str, heading: str) -> str:
    text = (REPOSITORY / page).read_text()
    return text.split(f"## {heading}\n")[1].split("\n## ")[0]


def test_the_reading_tour_has_six_files_that_exist():
    tour = section("README.md", "Reading the source")
    stops = re.findall(r"^\d\. `([^`]+)`(.*)$", tour, re.M)
    assert len(stops) <= 6
    for stop, rest in stops:
        path = PACKAGE / stop
        assert path.is_file(), stop
        beside = re.findall(r"`([\w/]+(?:\.py|\.cpp|/))`", rest)
        assert all((path.parent / each).exists() for each in beside), (stop, beside)


def test_the_ways_that_contributors_are_shown_exist():
    ways = section("CONTRIBUTING.md", "Finding one's way")
    tour = section("README.md", "Reading the source")
    rows = re.findall(r"^\| (?!question)[^|]+\| `([^`]+)`[^|]*\| `([^`]+)` \|$", ways, re.M)
    assert len(rows) == 3
    for first, last in rows:
        assert first in tour, "from the README in two hops"
        assert (PACKAGE / first).is_file() and (PACKAGE / last).is_file()


def test_all_names_of_the_package_are_in_the_table_of_the_reference():
    page = (REPOSITORY / "docs" / "api.md").read_text()
    rooms = {path.stem for path in PACKAGE.iterdir()}
    named = re.findall(r"^\| `penstock\.(\w+)` \|", page, re.M)
    assert set(penstock.__all__) - rooms - {"__version__"} <= set(named)
