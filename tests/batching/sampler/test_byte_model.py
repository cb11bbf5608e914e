"""Predicted bytes hold on batches that the model has not seen, and it says how well it fits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.batching import BalancedBatchSampler, ByteModel, Padded, probe_batches
from penstock.batching._meter import measured_peak
from penstock.batching.sampler._byte_model import nonnegative_least_squares

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensor.*:UserWarning")
NUM_SAMPLES = 400


def test_a_peak_is_what_was_alive_at_once():
    kept = torch.ones(1000)

    def run():
        first = torch.zeros(1000)  # 4000 bytes
        second = first.view(10, 100) + 1  # 8000
        del first
        third = second.exp()  # 8000
        kept.add_(1)
        return third[:5]

    assert measured_peak(run) == (8000, 4000)


def gin_step():
    """A training step of a small GIN over some of many random graphs."""
    random = np.random.default_rng(0)
    nodes = random.lognormal(3, 0.8, NUM_SAMPLES).astype(int) + 2
    edges = (nodes * random.uniform(1, 5, NUM_SAMPLES)).astype(int)
    torch.manual_seed(0)
    layers = nn.ModuleList(
        nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 32)) for width in (4, 32, 32)
    )
    classify = nn.Linear(32, 2)
    parameters = [*layers.parameters(), *classify.parameters()]
    optimizer = torch.optim.Adam(parameters)

    def step(batch):
        num_nodes = int(nodes[batch].sum())
        index = torch.randint(0, num_nodes, (2, int(edges[batch].sum())))
        graph = torch.repeat_interleave(torch.as_tensor(nodes[batch]))
        x = torch.randn(num_nodes, 4)
        for layer in layers:
            x = layer(x + torch.zeros_like(x).index_add(0, index[1], x[index[0]])).relu()
        pooled = torch.zeros(len(batch), 32).index_add(0, graph, x)
        loss = nn.functional.cross_entropy(classify(pooled), torch.zeros(len(batch)).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step, {"nodes": nodes, "edges": edges}


def transformer_step(width=32, hidden=64):
    lengths = np.random.default_rng(1).integers(4, 80, NUM_SAMPLES)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 4, hidden, dropout=0.1, batch_first=True)
    words = nn.Embedding(50, width)
    parameters = [*layer.parameters(), *words.parameters()]
    optimizer = torch.optim.Adam(parameters)

    def step(batch):
        length = int(lengths[batch].max())
        tokens = torch.zeros(len(batch), length, dtype=torch.long)
        padding = torch.arange(length) >= torch.as_tensor(lengths[batch])[:, None]
        loss = layer(words(tokens), src_key_padding_mask=padding).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step, {"tokens": Padded(lengths), "pairs": Padded(lengths**2)}


def wide_transformer_step():
    """Where the optimizer needs more than a small batch."""
    return transformer_step(width=64, hidden=256)


@pytest.mark.parametrize("make", [gin_step, transformer_step, wide_transformer_step])
def test_predictions_hold_outside_of_the_fit(make):
    step, features = make()
    model = ByteModel.fit(step, probe_batches(features), features)
    costs = model.costs(features)
    random = np.random.default_rng(2)
    by_size = np.argsort(sum(np.asarray(getattr(f, "values", f)) for f in features.values()))
    for count in (1, 3, 10, 30, 60):  # up to twice what was measured
        for among in (slice(None), slice(0, 80), slice(-80, None)):
            batch = random.choice(by_size[among], count, replace=False).tolist()
            measured = measured_peak(lambda batch=batch: step(batch))[0]
            predicted = model.predict(batch, features)
            assert predicted == pytest.approx(measured, rel=0.05), (count, str(model))
            assert costs.of_batch(batch) >= measured
    assert model.margin < 0.1
    assert "errors of probes" in str(model) and "margin" in str(model)


def test_a_cap_of_predicted_bytes_holds_when_measured():
    step, features = transformer_step()
    model = ByteModel.fit(step, probe_batches(features), features)
    sampler = BalancedBatchSampler(model.costs(features), max_bytes="3MiB")
    batches = list(sampler)
    peaks = [measured_peak(lambda batch=batch: step(batch))[0] for batch in batches[:12]]
    assert max(peaks) <= 3 << 20
    assert np.mean(peaks) > 0.7 * (3 << 20)


@settings(max_examples=100)
@given(
    rows=st.lists(
        st.lists(st.floats(0, 100).map(lambda x: round(x, 2)), min_size=3, max_size=3),
        min_size=3,
        max_size=8,
    ),
    seed=st.integers(0, 100),
)
def test_least_squares_meet_the_conditions_of_the_optimum(rows, seed):
    matrix = np.array(rows)
    target = np.random.default_rng(seed).normal(size=len(matrix)) * 50
    x = nonnegative_least_squares(matrix, target)
    gradient = matrix.T @ (matrix @ x - target)
    scale = 1e-6 * (1 + np.abs(matrix).max() * np.abs(target).max()) * len(matrix)
    assert (x >= 0).all()
    assert (gradient >= -scale).all()
    assert np.abs(gradient[x > 0]).max(initial=0) <= scale


def test_what_no_batch_goes_below_is_found():
    """The optimizer's moment: below it the number of samples does not matter."""
    lengths = np.arange(1, 61)

    def step(batch):
        keep = torch.zeros(500 + 100 * int(lengths[batch].sum()), dtype=torch.uint8)
        del keep
        torch.zeros(9000, dtype=torch.uint8)

    features = {"nodes": lengths}
    model = ByteModel.fit(step, probe_batches(features), features)
    assert model.least_bytes == pytest.approx(9000)
    assert model.summed_bytes["nodes"] == pytest.approx(100, rel=0.001)
    costs = model.costs(features)
    for batch in ([0], [1, 2], [10, 20, 30], [59] * 20):
        assert model.predict(batch, features) == max(9000, 500 + 100 * lengths[batch].sum())
        assert costs.of_batch(batch) >= 1.05 * model.predict(batch, features) - 1
    assert costs.of_each().min() >= 9000
    with pytest.raises(ValueError, match="60 of 60 samples cost more"):
        BalancedBatchSampler(costs, max_bytes=8000)
    # Where every probe is above it there is none to see, and nothing is made up.
    above = ByteModel.fit(step, [[59] * 9, [59] * 20, [50] * 30], features)
    assert above.least_bytes == 0


def test_known_coefficients_are_found_and_saved(tmp_path):
    lengths = np.arange(1, 40)

    def step(batch):
        longest = int(lengths[batch].max())
        keep = torch.zeros(1000 + 100 * len(batch) * longest, dtype=torch.uint8)
        more = torch.zeros(7 * int(lengths[batch].sum()), dtype=torch.uint8)
        del keep, more

    features = {"padded": Padded(lengths), "summed": lengths, "nothing": lengths % 3}
    model = ByteModel.fit(step, probe_batches(features, max_samples=16), features)
    assert model.fixed_bytes == pytest.approx(1000, rel=0.01)
    assert model.padded_bytes["padded"] == pytest.approx(100, rel=0.001)
    assert model.summed_bytes["summed"] == pytest.approx(7, rel=0.01)
    assert model.summed_bytes["nothing"] == pytest.approx(0, abs=0.1)
    assert model.margin == 0.05
    model.save(tmp_path / "model.json")
    assert ByteModel.load(tmp_path / "model.json") == model
    (tmp_path / "model.json").write_text('{"format": "x"}')
    with pytest.raises(ValueError, match=r"model\.json does not hold a byte model"):
        ByteModel.load(tmp_path / "model.json")


def test_wrong_arguments_are_refused():
    def step(batch):
        torch.ones(len(batch))

    with pytest.raises(ValueError, match="features is empty"):
        ByteModel.fit(step, [[0], [1]], {})
    with pytest.raises(ValueError, match="two batches or more"):
        ByteModel.fit(step, [[0]], {"nodes": [1, 2]})
    with pytest.raises(TypeError, match="features is a list"):
        ByteModel.fit(step, [[0], [1]], [1, 2])
    with pytest.raises(TypeError, match="samples must be batches"):
        ByteModel.fit(step, [0, 1], {"nodes": [1, 2]})
    for margin in (-1, float("inf")):
        with pytest.raises(ValueError, match="margin must be finite and >= 0"):
            ByteModel.fit(step, [[0], [1]], {"nodes": [1, 2]}, margin=margin)
    with pytest.raises(ValueError, match="step took no memory on cpu"):
        ByteModel.fit(lambda batch: None, [[0], [1]], {"nodes": [1, 2]})
    with pytest.raises(ValueError, match="num_probes is 0, but must be at least 1"):
        probe_batches({"nodes": [1, 2]}, num_probes=0)
    with pytest.raises(ValueError, match=r"features\['nodes'\] must be finite"):
        ByteModel.fit(step, [[0], [1]], {"nodes": [1, float("nan")]})
    with pytest.raises(ValueError, match="got lengths"):
        ByteModel.fit(step, [[0], [1]], {"nodes": [1, 2], "edges": [1]})
    model = ByteModel.fit(step, [[0], [1]], {"nodes": [1, 2]})
    with pytest.raises(ValueError, match="must be those of the fit"):
        model.costs({"edges": [1]})
    for batch, error in (([2], ValueError), ([-1], ValueError), ([True, False], TypeError)):
        with pytest.raises(error, match=r"batch must be .*numbers"):
            model.predict(batch, {"nodes": [1, 2]})
        with pytest.raises(error, match=r"samples must be .*numbers"):
            model.costs({"nodes": [1, 2]}).of_batch(batch)


def test_a_missing_feature_is_said(caplog):
    """Memory grows as the square of a length, and only the length is given."""
    lengths = np.arange(1, 200)

    def step(batch):
        sum(torch.ones(int(lengths[i]) ** 2) for i in batch[:1])

    features = {"tokens": lengths}
    ByteModel.fit(step, [[k] for k in (5, 20, 60, 190)], features)
    assert "one is missing" in caplog.text and "['tokens']" in caplog.text
    caplog.clear()
    ByteModel.fit(step, [[k] for k in (5, 20, 60, 190)], {"pairs": lengths**2})
    assert not caplog.records
