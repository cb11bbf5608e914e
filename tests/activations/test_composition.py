"""Offloading under what training loops are made of: each gives the bits that it gives without."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import penstock
from _waiting import wait_until
from penstock.activations import Offload
from penstock.memory import Tier

HIDDEN = 64
KIB = 1024

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def everything(store) -> Iterator[Offload]:
    """An Offload that sends out every eligible byte; nothing may be left in it afterwards."""
    offload = penstock.offload(store, policy="all", min_bytes="0B")
    yield offload
    gc.collect()
    offload.close()
    assert all(offload.ledger.resident(tier) == 0 for tier in Tier)


Trace = tuple[list[torch.Tensor], dict[str, torch.Tensor]]


def train(
    model: nn.Module,
    batches: Iterable[torch.Tensor],
    forward: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None,
) -> Trace:
    """Losses of each step, and parameters, buffers and last gradients after all of them."""
    torch.manual_seed(1)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    losses = []
    for batch in batches:
        out = model(batch) if forward is None else forward(model, batch)
        loss = out.float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    grads = {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return losses, state | grads


def assert_same(found: Trace, expected: Trace) -> None:
    """Bit for bit; NaN counts as different, for no test here may produce one."""
    assert len(found[0]) == len(expected[0])
    for step, (ours, stock) in enumerate(zip(found[0], expected[0], strict=True)):
        assert torch.equal(ours, stock), f"loss of step {step}: {ours} instead of {stock}"
    assert found[1].keys() == expected[1].keys()
    for name, stock in expected[1].items():
        assert torch.equal(found[1][name], stock), name


class SavedStorages(saved_tensors_hooks):
    """Counts what autograd saves by itself: unique storages, without those of some modules.

    Every tensor is kept, so no storage dies and none is counted twice. Independent of Penstock's
    own account, which it checks.
    """

    def __init__(self, *modules: nn.Module) -> None:
        own = {
            tensor.untyped_storage()._cdata
            for module in modules
            for tensor in (*module.parameters(), *module.buffers())
        }
        self.storages: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                self.storages[storage._cdata] = storage
            return tensor.detach()

        super().__init__(pack, lambda tensor: tensor)

    def __enter__(self) -> SavedStorages:
        super().__enter__()
        return self

    @property
    def num_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())


def batches_of(*shape: int, count: int = 4, seed: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for _ in range(count)]


def encoder(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(HIDDEN, 4, 4 * HIDDEN, dropout, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def feed_forward(num_layers: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [(nn.Linear(HIDDEN, HIDDEN), nn.GELU()) for _ in range(num_layers)]
    return nn.Sequential(*(module for layer in layers for module in layer))


# ------------------------------------------------------------------------ loops


def test_plain_loop(everything):
    batches = batches_of(4, 32, HIDDEN, count=5)
    expected = train(encoder(), batches)
    with everything:
        assert_same(train(encoder(), batches), expected)
    report = everything.report()
    assert report.num_steps == 5
    assert report.bytes_read > 0


def test_gradient_accumulation(everything):
    def run() -> Trace:
        model = encoder()
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for step, batch in enumerate(batches_of(4, 32, HIDDEN, count=6)):
            loss = model(batch).square().mean() / 3
            loss.backward()
            losses.append(loss.detach())
            if step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        return losses, dict(model.state_dict())

    expected = run()
    with everything:
        assert_same(run(), expected)
    assert everything.report().num_steps == 6  # a micro-batch is a step


def test_models_trained_in_turn(everything):
    """A GAN: each model's backward pass also runs through the other one."""

    def run() -> Trace:
        generator, discriminator = feed_forward(), feed_forward()
        optimizers = [
            torch.optim.AdamW(model.parameters(), 1e-3) for model in (generator, discriminator)
        ]
        losses = []
        for real in batches_of(32, HIDDEN):
            fake = generator(real.flip(0))
            judged = discriminator(real).mean() - discriminator(fake.detach()).mean()
            optimizers[1].zero_grad()
            judged.backward()
            optimizers[1].step()
            fooled = discriminator(fake).mean()  # the graph of `fake` is older than that step
            optimizers[0].zero_grad()
            fooled.backward()
            optimizers[0].step()
            losses += [judged.detach(), fooled.detach()]
        return losses, dict(nn.ModuleList([generator, discriminator]).state_dict())

    expected = run()
    with everything:
        assert_same(run(), expected)


def test_loop_in_a_generator(everything):
    """The block is entered and left by a generator, which its consumer interrupts."""
    batches = batches_of(32, HIDDEN)

    def steps(model: nn.Module) -> Iterator[torch.Tensor]:
        with everything:
            for batch in batches:
                model.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                yield loss.detach()

    expected = [loss.item() for loss in steps(feed_forward())]
    found, model, other = [], feed_forward(), feed_forward()
    for loss in steps(model):
        found.append(loss.item())
        other(batches[0]).sum().backward()  # inside the block, between two steps
    assert found == expected
    abandoned = steps(model)
    next(abandoned)
    abandoned.close()  # leaves the block by GeneratorExit
    before = everything.report().num_saved
    model(batches[0]).sum().backward()
    assert everything.report().num_saved == before


@pytest.mark.parametrize("shared", [True, False], ids=["one offload", "one each"])
def test_threads_each_with_a_model(store, shared):
    """Models differ in size, so that mixed-up storages would not even fit."""
    models = [feed_forward(layers) for layers in (1, 2, 4)]
    batches = [batches_of(16 * (index + 1), HIDDEN, seed=index) for index in range(3)]

    def grads(index: int) -> list[torch.Tensor]:
        found = []
        for batch in batches[index]:
            models[index].zero_grad()
            models[index](batch).square().mean().backward()
            found += [parameter.grad.clone() for parameter in models[index].parameters()]
        return found

    expected = [grads(index) for index in range(3)]
    offloads = [penstock.offload(store, policy="all", min_bytes="0B") for _ in range(3)]
    results: dict[int, list[torch.Tensor]] = {}

    def run(index: int) -> None:
        with offloads[0 if shared else index]:
            for _ in range(5):
                found = grads(index)
            results[index] = found

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == [0, 1, 2]
    for index, stock in enumerate(expected):
        for ours, theirs in zip(results[index], stock, strict=True):
            assert torch.equal(ours, theirs)
    assert all(offload.report().saved_bytes for offload in offloads[: 1 if shared else 3])
    for offload in offloads:
        offload.close()


def test_two_offloads(store):
    """The innermost one gets what is saved; a graph may have parts in both."""
    outer = penstock.offload(store, policy="all", min_bytes="0B")
    inner = penstock.offload(store, policy="all", min_bytes="0B")
    batches = batches_of(32, HIDDEN)
    expected = train(feed_forward(6), batches)

    def forward(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        hidden = model[:4](batch)
        with inner:
            hidden = model[4:8](hidden)
        return model[8:](hidden)

    with outer:
        assert_same(train(feed_forward(6), batches, forward), expected)
    for offload in (outer, inner):
        assert offload.report().num_steps == len(batches)
        assert offload.report().offloaded_bytes > 0
        offload.close()


def test_data_loader_workers_fork_while_offloading(everything):
    dataset = TensorDataset(torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(3)))

    def run() -> Trace:
        model = feed_forward()
        loader = DataLoader(
            dataset, batch_size=8, num_workers=2, prefetch_factor=1, multiprocessing_context="fork"
        )
        other = feed_forward()
        held = other(dataset[:8][0]).square().mean()  # in flight while the workers are forked
        with warnings.catch_warnings():
            # From Python 3.12 on a fork with threads warns; that it works is what is tested.
            warnings.simplefilter("ignore", DeprecationWarning)
            losses, state = train(model, (batch for (batch,) in loader))
        held.backward()
        return [*losses, held.detach()], state | {"other.grad": other[0].weight.grad}

    expected = run()
    assert len(expected[0]) == 9
    with everything:
        assert_same(run(), expected)
    assert everything.report().bytes_written > 0


# ---------------------------------------------------------------------- modules


class Recurrent(nn.Module):
    """LSTM and GRU as PyTorch has them, and a cell unrolled by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(HIDDEN, 32, 2, batch_first=True, dropout=0.1, bidirectional=True)
        self.gru = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.cell = nn.LSTMCell(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(x)
        x, _ = self.gru(x)
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        assert state is not None
        return state[0]


def test_recurrent_networks(everything):
    batches = batches_of(8, 12, HIDDEN, count=3)
    expected = train(Recurrent(), batches)
    with everything:
        assert_same(train(Recurrent(), batches), expected)
    assert everything.report().offloaded_bytes > 0


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
        nn.MaxPool2d(2),
        *(nn.Conv2d(16, 32, 3, bias=False), nn.BatchNorm2d(32), nn.SiLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10)),
    )


@pytest.mark.parametrize("frozen_statistics", [False, True], ids=["train", "eval"])
def test_batch_norm(everything, frozen_statistics):
    """Running statistics change in place in every forward pass; in eval mode they are saved."""

    def model() -> nn.Module:
        made = convolutions()
        for module in made.modules():
            if isinstance(module, nn.BatchNorm2d) and frozen_statistics:
                module.running_var.uniform_(0.5, 2.0)
                module.eval()
        return made

    batches = batches_of(4, 3, 16, 16)
    expected = train(model(), batches)
    with everything:
        assert_same(train(model(), batches), expected)
    assert everything.report().offloaded_bytes > 0


class TiedLanguageModel(nn.Module):
    """The embedding is the output projection too; a buffer is shared with nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(512, HIDDEN)
        self.body = feed_forward(2)
        self.head = nn.Linear(HIDDEN, 512, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(HIDDEN))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(tokens) * self.scale))


def test_tied_weights(everything):
    batches = [torch.randint(0, 512, (4, 16)) for _ in range(3)]
    expected = train(TiedLanguageModel(), batches)
    with everything:
        assert_same(train(TiedLanguageModel(), batches), expected)
    with everything:
        model, before = TiedLanguageModel(), everything.report().saved_bytes
        with SavedStorages(model) as counted:
            model(batches[0]).square().mean()
        model(batches[0]).square().mean()
    assert everything.report().saved_bytes - before == counted.num_bytes
    assert counted.num_bytes < 4 * 16 * (512 + 8 * HIDDEN) * 4  # and no weight among them


def test_dropout_draws_the_same_numbers(everything):
    batches = batches_of(16, HIDDEN, count=2)

    def run() -> tuple[Trace, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Dropout(0.3), nn.Linear(HIDDEN, HIDDEN), nn.RReLU()),
            *(nn.AlphaDropout(0.2), nn.Linear(HIDDEN, HIDDEN)),
        )
        return train(model, batches), torch.get_rng_state()

    expected, state = run()
    with everything:
        found, found_state = run()
    assert_same(found, expected)
    assert torch.equal(found_state, state)


class LowRank(nn.Module):
    """A frozen linear layer with a trained low-rank update (LoRA), and a frozen norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width).requires_grad_(False)
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, 4, bias=False)
        self.up = nn.Linear(4, width, bias=False)
        self.register_buffer("scale", torch.rand(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return functional.gelu(self.base(x) + self.up(self.down(x)) * self.scale)


def low_rank_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[LowRank(256) for _ in range(3)])


def test_frozen_weights_are_not_offloaded(everything):
    """The batch is small, so one frozen weight would outweigh all activations."""
    batches = batches_of(4, 256)
    expected = train(low_rank_model(), batches)
    with everything:
        assert_same(train(low_rank_model(), batches), expected)
    model = low_rank_model()
    with SavedStorages(model) as counted:
        model(batches[0]).square().mean()
    report = everything.report()
    assert report.saved_bytes == len(batches) * counted.num_bytes
    assert counted.num_bytes < 256 * 256 * 4


def test_frozen_weights_of_a_part_that_was_replaced(everything):
    """A part of a known model gets other weights (`.to()`, LoRA merging) and runs by itself."""
    model = low_rank_model()
    with everything:
        model(batches_of(4, 256)[0]).sum().backward()
        model.double()
        before = everything.report().saved_bytes
        model[1](batches_of(4, 256)[0].double().requires_grad_()).sum().backward()
    assert everything.report().saved_bytes - before < 256 * 256 * 8


def test_batches_that_are_slices_of_a_data_set(everything):
    """The data set's storage is its owner's: writing all of it for one batch would free nothing."""
    data = torch.randn(4096, HIDDEN, generator=torch.Generator().manual_seed(3))
    batches = [data[start : start + 16] for start in range(0, 64, 16)]
    expected = train(feed_forward(), batches)
    with everything:
        assert_same(train(feed_forward(), batches), expected)
    assert everything.report().offloaded_bytes > 0
    assert everything.report().offloaded_bytes < data.untyped_storage().nbytes()


def test_autocast(everything):
    """Cast copies of the weights are saved too: they are not parameters, and may leave."""
    batches = batches_of(4, 32, HIDDEN, count=3)

    def forward(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch)

    expected = train(encoder(), batches, forward)

    def forward_and_wait(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out = forward(model, batch)
        wait_until(lambda: most_is_written(everything))
        return out

    with everything:
        assert_same(train(encoder(), batches, forward_and_wait), expected)


# ------------------------------------------------------------------- checkpoint


class Checkpointed(nn.Module):
    """Encoder layers, each under `torch.utils.checkpoint`; remembers what went into them."""

    def __init__(self, *, use_reentrant: bool, num_layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(HIDDEN, 4, 2 * HIDDEN, 0.1, batch_first=True)
            for _ in range(num_layers)
        )
        self.use_reentrant = use_reentrant
        self.inputs: list[StorageWeakRef] = []
        self.input_bytes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The reentrant kind needs an input that requires a gradient. Not a leaf: those stay.
        x = x.clone().requires_grad_() * 1.0
        for layer in self.layers:
            self.inputs.append(StorageWeakRef(x.untyped_storage()))
            self.input_bytes += x.untyped_storage().nbytes()
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("policy", ["all", "auto"])
def test_checkpoint(store, use_reentrant, policy):
    batches = batches_of(4, 32, HIDDEN)
    expected = train(Checkpointed(use_reentrant=use_reentrant), batches)
    offload = penstock.offload(store, policy=policy, min_bytes="4KiB")
    model = Checkpointed(use_reentrant=use_reentrant)
    with offload:
        assert_same(train(model, batches), expected)
    if policy == "all":
        assert offload.report().offloaded_bytes >= model.input_bytes
    else:
        assert offload.report().offloaded_bytes > 0
    offload.close()


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpoint_inputs_leave_memory(everything, use_reentrant):
    """Between forward and backward no input of a checkpointed layer is in memory."""
    model = Checkpointed(use_reentrant=use_reentrant)
    with everything:
        loss = model(batches_of(4, 32, HIDDEN)[0]).square().mean()
        wait_until(lambda: all(weak.expired() for weak in model.inputs))
        report = everything.report()
        assert report.bytes_written >= model.input_bytes
        assert everything.ledger.resident(Tier.FILE) >= model.input_bytes
        loss.backward()
    assert everything.report().bytes_read >= model.input_bytes


def test_checkpoint_that_stops_early_or_never_runs_backward(everything):
    model = Checkpointed(use_reentrant=False)
    batches = batches_of(4, 32, HIDDEN)
    expected = train(model, batches[:1])
    model = Checkpointed(use_reentrant=False)
    with everything:
        model(batches[1]).square().mean()  # abandoned
        middle = model.layers[0](batches[2])
        del middle
        assert_same(train(model, batches[:1]), expected)


def most_is_written(offload: Offload) -> bool:
    """The bar for policy="all"; a loop as small as these must wait for it before its backward."""
    report = offload.report()
    return report.bytes_written >= 0.85 * report.saved_bytes > 0


@pytest.mark.parametrize("name", ["LazyLinear", "LazyBatchNorm1d", "SAGEConv", "Linear"])
def test_modules_whose_parameters_come_with_the_first_batch(name, everything):
    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        x, edges = torch.randn(30, 5), torch.tensor([[0, 1, 7], [1, 2, 3]])
        if name == "LazyLinear":
            model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(4))
        elif name == "LazyBatchNorm1d":
            model = nn.LazyBatchNorm1d()
        else:
            geometric = pytest.importorskip("torch_geometric.nn")
            sizes = ((-1, -1), 8) if name == "SAGEConv" else (-1, 8)
            model = getattr(geometric, name)(*sizes)
        for _ in range(2):
            (model(x, edges) if name == "SAGEConv" else model(x)).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = run()
    with everything:
        found = run()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Named(nn.Module):
    """Compares by value, so that it has no hash; `names` of `nn.Module` are data of its own."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(HIDDEN, HIDDEN)
        self.__dict__.update(dict.fromkeys(names, 0.1))
        self.layer.__dict__.update(dict.fromkeys(names, 0.1))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sin() + self.layer(2 * x)


@pytest.mark.parametrize("name", ["modules", "parameters", "buffers"])
def test_modules_that_give_names_of_modules_to_data(name, everything):
    """None of their weights leaves, as of any module."""
    x = torch.ones(8, HIDDEN, requires_grad=True)  # so that weights are saved
    model, stock = Named(name), Named()
    model.layer.weight.requires_grad_(False)
    with everything:
        (model(x) * model.layer.bias).sum().backward()
    (stock(x) * stock.layer.bias).sum().backward()
    assert torch.equal(model.layer.bias.grad, stock.layer.bias.grad)
    assert everything.report().peak_device_bytes < model.layer.weight.nbytes
