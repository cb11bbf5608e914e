"""The example trains, asks with every selector, and draws what it found."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("matplotlib", reason="penstock[viz] installs matplotlib").use("Agg")
pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = (
    *("--length", "1024", "--facts", "16", "--contexts", "2", "--questions", "2"),
    *("--steps", "2", "--long-steps", "1", "--hidden", "32", "--layers", "1"),
    *("--block-tokens", "16"),
)


def test_it_trains_asks_and_draws(example, tmp_path, capsys):
    figure = tmp_path / "figure.png"
    found = example.main([*TINY, "--figure", str(figure)])
    names = ["double_sparsity", "nosa", "accumulated", "window"]
    expected = [("all", 1.0)] + [(name, share) for name in names for share in example.SHARES]
    assert [(each.selector, each.share) for each in found] == expected
    assert all(each.num_asked == 4 for each in found)
    exact, *others = found
    # 64 blocks of 16 tokens, 2 heads, keys and values of 64 channels in float32.
    assert exact.read_bytes == 4 * 64 * 2 * 16 * 2 * 64 * 4
    assert all(each.read_bytes == round(each.share * exact.read_bytes) for each in others)
    assert all(0 < each.fetched_bytes <= each.read_bytes for each in found)
    assert figure.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "answers from 1024 tokens" in said and "the budget is 64.00 KiB" in said


def test_a_question_has_its_answer_behind_it_in_the_context(example):
    generator = torch.Generator().manual_seed(0)
    contexts = example.draw_contexts(3, 64, 8, 5, generator)
    for tokens, keys, values in zip(contexts.tokens, contexts.keys, contexts.values, strict=True):
        for key, value in zip(keys, values, strict=True):
            (place,) = (tokens == key).nonzero().flatten().tolist()
            assert tokens[place + 1] == value


def test_the_margin_is_wilsons_interval(example):
    answers = example.Answers("all", 1.0, 95, 100, (1.0,), 0, 0, 0)
    assert example.margin(answers) == pytest.approx(0.0451, abs=1e-4)  # 0.888 to 0.979
    assert example.margin(example.replace(answers, num_right=100)) > 0
