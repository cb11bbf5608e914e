"""The example trains its jobs, saves them, and finds the same logits with stock PEFT."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib", reason="penstock[viz] installs matplotlib").use("Agg")
pytest.importorskip("peft")
pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = (
    *("--steps", "4", "--base-steps", "3", "--samples", "40", "--length", "48"),
    *("--hidden", "32", "--layers", "1"),
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "batching" / "text"
    folder.mkdir(parents=True)
    (folder / "sst_trees.txt").write_text("(3 (2 The) (4 (1 bad) (0 film)))\n" * 60)
    (folder / "lattices.txt").write_text("12\n0 3 3\n1 0 232\n2 1 341 0 916\n\n" * 60)
    return tmp_path


@pytest.mark.parametrize("has_data", [False, True])
def test_it_trains_saves_and_loads(example, data, tmp_path, capsys, monkeypatch, has_data):
    monkeypatch.delenv("PENSTOCK_DATA", raising=False)
    figure, out = tmp_path / "figure.png", tmp_path / "adapters"
    more = ("--data", str(data)) if has_data else ()
    report, before, after, differences = example.main(
        [*TINY, *more, "--figure", str(figure), "--out", str(out)]
    )
    names = [job.name for job in report.jobs]
    assert names == ["network", "numbers", *(("reviews", "lattices") if has_data else names[2:])]
    assert len(names) == 4 and "lattices" not in names[:2]
    assert [job.state for job in report.jobs] == ["finished"] * 4 and report.is_exact
    assert all(after[name] < before[name] for name in names)
    assert all(difference < 1e-5 for difference in differences.values())
    assert all((out / "latest" / name / "adapter_model.safetensors").exists() for name in names)
    assert figure.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "four jobs on one base" in said and "loss of text held out" in said


def test_text_is_cut_at_paragraphs(example):
    parts = [b"one", b"two", b"three", b"a long one that has to be cut"]
    samples = [bytes(each.tolist()) for each in example.cut_text(parts, None, 12)]
    assert samples == [b"one\n\ntwo\n\n", b"three\n\n", b"a long one\n\n"]
    assert len(example.cut_text(parts, 2, 12)) == 2


def test_words_of_a_tree_are_read_in_their_order(example, data):
    texts = example.read_texts(str(data), 3, 14)
    assert bytes(texts["reviews"][0].tolist()) == b"The bad film\n\n"


def test_the_same_base_is_made_in_every_call(example):
    first, second = (example.make_base(32, 1, 16).state_dict() for _ in range(2))
    assert all(torch.equal(each, second[name]) for name, each in first.items())
