"""Modules of PyTorch as layers: the losses of PyTorch, the same bits however a chain is cut, and errors with their tracebacks."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import hydra_train as hydra

numpy = pytest.importorskip("numpy", reason="NumPy is not installed here")
torch = pytest.importorskip("torch", reason="PyTorch is not installed here")

from torch.nn.utils import prune  # noqa: E402

from hydra_train.torch import Chain, Chained  # noqa: E402

nn, functional = torch.nn, torch.nn.functional
WIDTH, ITEMS = 256, 24
LOCK = threading.Lock()
#: Six minibatches of the rows in their order, on one device with memory for the whole chain.
PLAIN: dict[str, Any] = {"batch": 4, "steps": 6, "no_shuffle": True, "optimizer": "sgd", "weight_decay": 0, "devices": "cpu:1x1", "device_memory": "64MiB"}


def rows(items: int = ITEMS, seed: int = 1) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(items, WIDTH, generator=generator)
    return [{"x": row, "y": row.sum().sign().clamp(0).long().reshape(1)} for row in x]


def cross_entropy(outputs: Any, batch: Any) -> Any:
    return functional.cross_entropy(outputs, batch["y"].reshape(-1))


def perceptron(middle: Callable[[], Any] = lambda: nn.ReLU(), depth: int = 4, **settings: Any) -> Chain:
    """Linear modules, each followed by `middle`, with weights that are always the same."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), middle()) for _ in range(depth - 1)]
    return Chain([*blocks, nn.Linear(WIDTH, 2)], inputs="x", loss=cross_entropy, **settings)


def trained(chain: Chain, data: Any = None, **settings: Any) -> Any:
    run = hydra.select(model=chain, data=data or rows(), **(PLAIN | {"lr": 0.1} | settings)).wait()
    return next(iter(run.tasks.values()))


class Noise(nn.Module):
    """Every way of drawing: dropout, tensors with and without an example, a permutation."""

    def forward(self, x: Any) -> Any:
        x = functional.dropout(x, 0.25, self.training) + 0.1 * torch.randn_like(x) * torch.rand(x.shape)
        return x[:, torch.randperm(x.shape[1])] + torch.randint(0, 3, (x.shape[1],))


def sgd(parameters: Any, lr: float) -> Any:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def plain_losses(
    parameters: Any, loss_of: Callable[[Any], Any], data: Any, steps: int = 6, lr: float = 0.1, optimizer_of: Callable[..., Any] = sgd
) -> list[float]:
    """Trains with a loop of PyTorch, and returns the losses."""
    optimizer, losses = optimizer_of(parameters, lr=lr), []
    for step in range(steps):
        loss = loss_of(torch.utils.data.default_collate(data[step * 4 : step * 4 + 4]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_losses_are_those_of_a_loop_of_pytorch() -> None:
    chain = perceptron()
    task = trained(chain)
    modules = nn.Sequential(*chain.load(task.model_dir).stages.values())
    torch.manual_seed(0)
    expected = nn.Sequential(*perceptron().modules.values())
    losses = plain_losses(expected.parameters(), lambda batch: cross_entropy(expected(batch["x"]), batch), rows())
    assert task.losses == pytest.approx(losses, rel=1e-5)
    for found, wanted in zip(modules.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_the_last_module_may_return_the_loss() -> None:
    class Loss(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.square().mean()

    def chain() -> Chain:
        torch.manual_seed(0)
        return Chain([nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2), Loss()], inputs="x")

    whole, cut = (trained(chain(), lr=0.01, **more) for more in ({}, {"cuts": [1, 3]}))
    assert (whole.losses, whole.weights_sha256) == (cut.losses, cut.weights_sha256)
    plain = Chained(chain().modules)
    assert whole.losses == pytest.approx(plain_losses(list(plain.parameters()), lambda batch: plain(batch["x"]), rows(), lr=0.01), rel=1e-5)


def right(outputs: Any, batch: Any) -> Any:
    return (outputs.argmax(-1) == batch["y"].reshape(-1)).sum()


def distance(outputs: Any, batch: Any) -> Any:
    return (outputs.softmax(-1)[:, 1] - batch["y"].reshape(-1)).abs().sum()


def test_metrics_are_sums_over_targets() -> None:
    def of(**settings: Any) -> Any:
        chain = perceptron(metrics={"accuracy": right, "distance": (distance, "min")})
        data = {"train": rows(), "validation": rows(11, seed=2), "test": rows(7, seed=3)}
        chosen = PLAIN | {"lr": [0.1, 0.001], "eval_every": 2, "metric": "accuracy"} | settings
        run = hydra.select(model=chain, data=data, **chosen).wait()
        return run, chain

    run, chain = of()
    for task in run.tasks.values():
        with torch.no_grad():
            outputs = chain.load(task.model_dir).eval()(torch.stack([row["x"] for row in rows(11, seed=2)]))
        batch = {"y": torch.stack([row["y"] for row in rows(11, seed=2)])}
        found = task.report["validation"]["metrics"]
        assert found["accuracy"] == right(outputs, batch).item() / 11
        assert found["distance"] == pytest.approx(distance(outputs, batch).item() / 11, rel=1e-5)
    accuracy, closest = ([task.report["validation"]["metrics"][name] for task in run.tasks.values()] for name in ("accuracy", "distance"))
    assert run.best.report["validation"]["metrics"]["accuracy"] == max(accuracy) and len(set(closest)) == 2
    by_distance, _ = of(metric="distance")
    distances = [task.report["validation"]["metrics"]["distance"] for task in by_distance.tasks.values()]
    assert by_distance.best.report["validation"]["metrics"]["distance"] == min(distances) < max(distances)
    other, _ = of(cuts=[1, 3], devices="cpu:2x1")
    found = [{name: task.report["validation"]["metrics"] for name, task in each.tasks.items()} for each in (run, other)]
    assert found[0] == found[1]
    with pytest.raises(hydra.UsageError, match="metric `share` must be a function"):
        perceptron(metrics={"share": 0.5})
    with pytest.raises(hydra.HydraError, match="the metric `rows` returned"):
        trained(perceptron(metrics={"rows": lambda outputs, _: outputs}), {"train": rows(), "validation": rows()})


def normalized() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(WIDTH), nn.ReLU())


@pytest.mark.parametrize(
    "middle", [nn.ReLU, lambda: nn.Dropout(0.3), Noise, normalized], ids=["relu", "dropout", "noise", "statistics"]
)
def test_bits_do_not_depend_on_cuts_devices_or_memory(middle: Callable[[], Any]) -> None:
    def hashes(**settings: Any) -> list[Any]:
        chosen = PLAIN | {"lr": [0.1, 0.01], "accumulate": 2} | settings
        run = hydra.select(model=perceptron(middle, depth=6), data=rows(), **chosen).wait()
        tasks = run.tasks
        return [(name, tasks[name].losses, tasks[name].weights_sha256) for name in sorted(tasks)]

    plain = hashes()
    assert plain[0][2] != plain[1][2]
    assert plain == hashes(cuts=[1, 2, 3, 5]) == hashes(cuts=[2], devices="cpu:2x1") == hashes(devices="cpu:2x1", replicas=2)
    assert plain == hashes(device_memory="3.25MiB", devices="cpu:2x1")


def test_running_statistics_are_those_of_pytorch() -> None:
    data = {"train": rows(), "validation": rows(10, seed=2)}
    # A rate at which the losses fall: losses that grow would magnify the order of a processor's sums.
    lr = 0.01
    several: list[dict[str, Any]] = [{}, {"cuts": [1, 3], "devices": "cpu:2x1"}]
    whole, cut = (trained(perceptron(normalized), data, lr=lr, **settings) for settings in several)
    assert (whole.losses, whole.weights_sha256) == (cut.losses, cut.weights_sha256)
    plain = Chained(perceptron(normalized).modules).train()
    assert whole.losses == pytest.approx(
        plain_losses(list(plain.parameters()), lambda batch: cross_entropy(plain(batch["x"]), batch), data["train"], lr=lr), rel=1e-5
    )
    loaded = whole.load()
    for name, expected in plain.named_buffers():
        found = loaded.get_buffer(name)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert int(loaded.get_buffer("stages.0.1.0.num_batches_tracked")) == 6
    # Evaluations read them.
    batch = {key: torch.stack([row[key] for row in data["validation"]]) for key in ("x", "y")}
    with torch.no_grad():
        expected = cross_entropy(loaded.eval()(batch["x"]), batch).item()
    assert whole.report["validation"]["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kept", ["", "own.eval()", "unused"])
def test_a_normalization_that_does_not_observe_keeps_its_statistics(kept: str) -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
            self.norm.running_mean.fill_(0.25)

        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            if kept == "own.eval()":
                self.norm.eval()
            return self

        def forward(self, x: Any) -> Any:
            return self.linear(x) if kept == "unused" else self.norm(self.linear(x))

    def chain() -> Chain:
        torch.manual_seed(4)
        return Chain([Kept(), nn.Linear(WIDTH, 2)], inputs="x", loss=cross_entropy)

    plain = Chained(chain().modules).train()
    expected = plain_losses(list(plain.parameters()), lambda batch: cross_entropy(plain(batch["x"]), batch), rows())
    whole = trained(chain(), weight_decay=0)
    assert whole.losses == pytest.approx(expected, rel=1e-5)
    found = whole.load().get_buffer("stages.0.norm.running_mean")
    assert found.eq(0.25).all() == bool(kept)
    torch.testing.assert_close(found, plain.get_buffer("stages.0.norm.running_mean"), rtol=1e-4, atol=1e-5)


def test_statistics_that_cannot_be_observed_once_are_refused() -> None:
    class Again(nn.Module):
        def __init__(self, norm: Any) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(WIDTH, WIDTH), norm

        def forward(self, x: Any) -> Any:
            return self.norm(self.linear(self.norm(x)))

    with pytest.raises(hydra.HydraError, match="`0.norm` is called 2 times in one forward"):
        trained(Chain([Again(nn.BatchNorm1d(WIDTH)), nn.Linear(WIDTH, 2)], inputs="x", loss=cross_entropy))
    norm = nn.BatchNorm1d(WIDTH)
    with pytest.raises(hydra.UsageError, match="`0` and `1` share the running statistics `0.running_mean`"):
        Chain([nn.Sequential(norm), nn.Sequential(norm), nn.Linear(WIDTH, 2)], inputs="x", loss=cross_entropy)
    with pytest.raises(hydra.UsageError, match="`0.running_mean` is of torch.float64"):
        Chain([nn.BatchNorm1d(WIDTH, affine=False).double(), nn.Linear(WIDTH, 2)], inputs="x", loss=cross_entropy)
    renormalized = type("Renormalized", (nn.BatchNorm1d,), {"forward": lambda self, x: x - self.running_mean})
    with pytest.raises(hydra.UsageError, match=r"`0` \(Renormalized\) has running statistics, which are supported of"):
        Chain([renormalized(WIDTH), nn.Linear(WIDTH, 2)], inputs="x", loss=cross_entropy)


def test_statistics_below_the_first_trained_layer_and_of_microbatches_are_those_of_pytorch() -> None:
    def chain() -> Chain:
        torch.manual_seed(4)
        return Chain([nn.BatchNorm1d(WIDTH, affine=False), nn.Linear(WIDTH, 2)], inputs="x", loss=cross_entropy)

    whole = trained(chain(), accumulate=2)
    plain = Chained(chain().modules).train()
    optimizer, data, losses = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), rows(), []
    for step in range(6):
        halves = [torch.utils.data.default_collate(data[at : at + 2]) for at in (step * 4, step * 4 + 2)]
        optimizer.zero_grad()
        parts = []
        for half in halves:
            loss = cross_entropy(plain(half["x"]), half) / 2
            loss.backward()
            parts.append(loss.item())
        optimizer.step()
        losses.append(sum(parts))
    assert whole.losses == pytest.approx(losses, rel=1e-5)
    loaded = whole.load()
    for name, expected in plain.named_buffers():
        torch.testing.assert_close(loaded.get_buffer(name), expected, rtol=1e-5, atol=1e-6)
    assert int(loaded.get_buffer("stages.0.num_batches_tracked")) == 12


def test_statistics_of_what_is_frozen_do_not_change() -> None:
    def chain() -> Chain:
        made = perceptron(normalized)
        for parameter in made.modules["1"].parameters():
            parameter.requires_grad_(False)
        made.modules["1"][1][0].running_mean.fill_(0.25)
        return made

    whole, cut = trained(chain()), trained(chain(), cuts=[1, 2])
    assert (whole.losses, whole.weights_sha256) == (cut.losses, cut.weights_sha256)
    plain = Chained(chain().modules).train()
    plain.stages["1"].eval()
    own = [each for each in plain.parameters() if each.requires_grad]
    assert whole.losses == pytest.approx(
        plain_losses(own, lambda batch: cross_entropy(plain(batch["x"]), batch), rows()), rel=1e-5
    )
    loaded = whole.load()
    assert loaded.get_buffer("stages.1.1.0.running_mean").eq(0.25).all()
    assert not loaded.get_buffer("stages.0.1.0.running_mean").eq(0).all()


def test_draws_inside_lstms_and_attention_have_the_bits_of_an_uncut_chain() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(WIDTH // 8, 32, num_layers=2, dropout=0.3, batch_first=True)

        def forward(self, x: Any) -> Any:
            return self.lstm(x.reshape(-1, 8, WIDTH // 8))[0]

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 2, dropout=0.3, batch_first=True)
            self.encoder, self.head = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.3, batch_first=True), nn.Linear(32, 2)

        def forward(self, x: Any) -> Any:
            return self.head(self.encoder(self.attention(x, x, x, need_weights=False)[0]).mean(1))

    def chain() -> Chain:
        torch.manual_seed(2)
        return Chain([Recurrent(), Attention()], inputs="x", loss=cross_entropy)

    whole, cut = trained(chain()), trained(chain(), cuts=[1])
    assert (whole.losses, whole.weights_sha256) == (cut.losses, cut.weights_sha256)
    assert whole.losses != trained(chain(), seed=1).losses


def test_a_random_module_differs_by_step_and_seed_and_is_off_in_evaluations() -> None:
    data = {"train": rows()[:4] * 6, "validation": rows()}
    task = trained(perceptron(lambda: nn.Dropout(0.5)), data, lr=1e-30, batch=4)
    assert len(set(task.losses)) == 6
    other = trained(perceptron(lambda: nn.Dropout(0.5)), data, lr=1e-30, batch=4, seed=1)
    assert set(task.losses).isdisjoint(other.losses)
    assert task.validation == other.validation == trained(perceptron(nn.Identity), data, lr=1e-30).validation


def test_the_trained_module_is_loaded_and_the_given_one_is_unchanged() -> None:
    chain = perceptron()
    before = [parameter.clone() for module in chain.modules.values() for parameter in module.parameters()]
    task = trained(chain, {"train": rows(), "validation": rows(seed=2)})
    module = task.load().eval()
    batch = torch.utils.data.default_collate(rows(seed=2))
    assert cross_entropy(module(batch["x"]), batch).item() == pytest.approx(task.validation["loss"], rel=1e-5)
    after = [parameter for module in chain.modules.values() for parameter in module.parameters()]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_weights_of_another_type_are_refused(tmp_path: Path) -> None:
    header = json.dumps({"0.0.weight": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))
    with pytest.raises(hydra.HydraError, match="has `0.0.weight` in BF16, expected F32 or I64"):
        perceptron().load(tmp_path)


def test_frozen_and_shared_parameters_and_several_tensors() -> None:
    class Twice(nn.Module):
        def __init__(self, linear: Any) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: Any, mask: Any) -> tuple[Any, Any]:
            return torch.where(mask, self.linear(x).tanh(), x), mask

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 2)

        def forward(self, x: Any, mask: Any) -> Any:
            return self.linear(x * mask)

    def chain() -> Chain:
        torch.manual_seed(3)
        shared, frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        modules = {"first": Twice(shared), "frozen": Twice(frozen), "again": Twice(shared), "head": Head()}
        return Chain(modules, inputs=["x", "mask"], loss=cross_entropy)

    data = [row | {"mask": row["x"] > -1} for row in rows()]
    whole, cut = (trained(chain(), data, **settings) for settings in ({}, {"cuts": [1, 2, 3]}))
    assert whole.weights_sha256 == cut.weights_sha256 and whole.losses == cut.losses
    plain, loaded = chain(), whole.load()
    assert torch.equal(loaded.stages["frozen"].linear.weight, plain.modules["frozen"].linear.weight)
    assert loaded.stages["first"].linear is loaded.stages["again"].linear
    stages = list(plain.modules.values())
    trainable = dict.fromkeys(each for stage in stages for each in stage.parameters() if each.requires_grad)

    def loss_of(batch: Any) -> Any:
        outputs: Any = (batch["x"], batch["mask"])
        for stage in stages:
            outputs = stage(*outputs)
        return cross_entropy(outputs, batch)

    assert whole.losses == pytest.approx(plain_losses(list(trainable), loss_of, data), rel=1e-5)
    torch.testing.assert_close(loaded.stages["first"].linear.weight, stages[0].linear.weight, rtol=1e-4, atol=1e-5)


class Scaled(nn.Module):
    """A module with a scalar parameter, and one that the loss does not depend on, which keeps a tensor."""

    alive: list[bool] = []
    kept: Any = lambda: None

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.unused, self.last = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(3)), None

    def forward(self, x: Any) -> Any:
        Scaled.alive.append(Scaled.kept() is not None)
        self.last = x.sin()
        Scaled.kept = weakref.ref(self.last)
        return self.last * self.scale


def test_scalars_are_trained_kept_tensors_are_released_and_what_is_unused_is_named() -> None:
    def modules() -> list[Any]:
        torch.manual_seed(4)
        return [Scaled(), nn.Linear(WIDTH, 2)]

    with pytest.warns(UserWarning, match="the loss of a batch does not depend on `0.unused`"):
        task = trained(Chain(modules(), inputs="x", loss=cross_entropy))
    assert len(Scaled.alive) >= 6 and not any(Scaled.alive[-3:])
    plain = nn.Sequential(*modules())
    losses = plain_losses(plain.parameters(), lambda batch: cross_entropy(plain(batch["x"]), batch), rows())
    assert task.losses == pytest.approx(losses, rel=1e-5)
    loaded = task.load().stages["0"].scale
    assert loaded.shape == torch.Size([]) and loaded.item() == pytest.approx(plain[0].scale.item(), rel=1e-5)


def test_one_thread_at_a_time_reads_a_dataset() -> None:
    class Seeking:
        """Rows behind a position, as in a file; a value that is missing is not a number."""

        def __init__(self) -> None:
            self.rows, self.at = [{**row, "z": torch.full((1,), torch.nan)} for row in rows()], 0

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> Any:
            self.at = index
            time.sleep(1e-4)
            return self.rows[self.at]

    run = hydra.select(model=perceptron(), data=Seeking(), **(PLAIN | {"lr": [0.1, 0.01], "devices": "cpu:2x1"})).wait()
    expected = hydra.select(model=perceptron(), data=rows(), **(PLAIN | {"lr": [0.1, 0.01]})).wait()
    assert [run.tasks[name].losses for name in expected.tasks] == [task.losses for task in expected.tasks.values()]


CALLS: dict[str, int] = {}


class Counted(nn.Module):
    """A linear map that counts its calls, and may fail or do something else."""

    def __init__(self, name: str, how: str = "") -> None:
        super().__init__()
        self.name, self.how, self.linear = name, how, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        CALLS[self.name] = CALLS.get(self.name, 0) + 1
        x = self.linear(x)
        if self.how == "fails":
            raise RuntimeError("it fails")
        return functional.gelu(x) if self.how == "gelu" else x.relu()


class Cached(nn.Module):
    """Keeps tensors for each length in a dictionary of the program."""

    known: dict[int, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        width = x.shape[1]
        if width not in self.known:
            self.known[width] = torch.arange(width) / width + 1
        return self.linear(x * self.known[width]).tanh()


def test_what_a_module_caches_outside_of_itself_has_values() -> None:
    def chain() -> Chain:
        torch.manual_seed(0)
        return Chain([Cached(), Cached(), nn.Linear(WIDTH, 2)], inputs="x", loss=cross_entropy)

    plain = Chained(chain().modules)
    found = trained(chain()).losses
    Cached.known.clear()
    expected = plain_losses(list(plain.parameters()), lambda batch: cross_entropy(plain(batch["x"]), batch), rows())
    assert found == pytest.approx(expected, rel=1e-5)


def test_modules_with_the_same_operations_are_measured_once() -> None:
    def keys(*how: str) -> list[Any]:
        blocks = [Counted(f"{at}", each) for at, each in enumerate(how)]
        return [layer.cost_key for layer in Chain([*blocks, nn.Linear(WIDTH, 2)], inputs="x", loss=cross_entropy).bind(rows()).layers]

    first, gelu, third, last = keys("", "gelu", "")
    assert first == third is not None and gelu not in (first, None) and last is None
    assert [key is None for key in keys("", "fails", "")] == [False, True, True, True], "what follows a module that fails"
    CALLS.clear()
    torch.manual_seed(0)
    chain = Chain([*(Counted(str(at)) for at in range(5)), nn.Linear(WIDTH, 2)], inputs="x", loss=cross_entropy)
    trained(chain)
    # The first one has no gradient of its input, so that its backward differs.
    assert CALLS["1"] > CALLS["2"] == CALLS["3"] == CALLS["4"], CALLS


class Broken(nn.Module):
    """A module that does something wrong, by name."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(1))
        self.calls, self.step = 0, torch.tensor(0.0)
        self.hidden = [nn.Parameter(torch.ones(WIDTH))]

    def forward(self, x: Any) -> Any:
        if self.how == "shapes":
            return self.linear(x[:, 1:])
        if self.how == "parameter":
            with torch.no_grad():
                self.linear.weight.mul_(0.5)
        if self.how == "input":
            x.data.zero_()
        if self.how == "buffer":
            self.seen += 1
        if self.how == "read buffer":
            self.seen.copy_(self.seen + 1)
        if self.how == "new buffer":
            self.seen = self.seen + 1
        if self.how == "random":
            # Hardly any draw changes an output.
            return self.linear(x) if random.random() < 0.9999 else x
        if self.how == "numpy":
            return self.linear(x) if numpy.random.rand() < 0.9999 else x
        if self.how == "outside":
            return self.linear(x) * os.urandom(1)[0]
        if self.how == "state":
            self.calls += 1
            # As a term that is warmed up.
            return self.linear(x) * min(1, max(0, self.calls - 1000))
        if self.how == "tensor":
            self.step = self.step + 1
            return self.linear(x) * self.step.clamp(max=1)
        if self.how == "list":
            return self.linear(x) * self.hidden[0]
        if self.how == "in place":
            return self.linear(functional.relu(x, inplace=True))
        if self.how == "sparse":
            return self.linear(x) + functional.embedding(torch.tensor([1]), self.linear.weight, sparse=True)
        if self.how == "own generator":
            return self.linear(x) * torch.rand(1, generator=torch.Generator())
        if self.how == "checkpoint":
            return torch.utils.checkpoint.checkpoint(lambda x: functional.dropout(self.linear(x)), x, use_reentrant=False)
        if self.how == "output":
            return {"x": self.linear(x)}
        if self.how == "type":
            return self.linear(x).double()
        return self.linear(x)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("shapes", "cannot be multiplied"),
        ("parameter", "changes a parameter or an input in place"),
        ("input", "changes a parameter or an input in place"),
        ("buffer", "changes its buffer `seen`"),
        ("read buffer", "changes its buffer `seen`"),
        ("new buffer", "changes its buffers"),
        ("random", "draws from the global generator of Python's `random`"),
        ("numpy", "draws from the global generator of `numpy.random`"),
        ("outside", "gives another output when it is run again"),
        ("state", "changes its attribute `calls` from 0 to 1 in a forward"),
        ("tensor", "changes its attribute `step` from tensor(0.) to tensor(1.) in a forward"),
        ("list", f"a tensor of shape [{WIDTH}] that requires a gradient and is no parameter of it"),
        ("in place", "omit `inplace=True`"),
        ("sparse", "omit `sparse=True`"),
        ("own generator", "a generator of its own"),
        ("checkpoint", "activation checkpointing"),
        ("output", "is a dict"),
        ("type", "torch.float64"),
    ],
)
def test_a_wrong_module_is_named_with_the_cause(how: str, expected: str) -> None:
    torch.manual_seed(0)
    chain = Chain({"first": nn.Linear(WIDTH, WIDTH), "wrong": Broken(how), "last": nn.Linear(WIDTH, 2)}, inputs="x", loss=cross_entropy)
    with pytest.raises(hydra.HydraError) as caught:
        trained(chain)
    text = str(caught.value)
    assert expected in text and "wrong" in text, text
    if how != "outside":
        assert "Traceback (most recent call last)" in text and "File " in text, text
    assert trained(perceptron()).state == "done", "another run in the same process"


def test_other_threads_may_draw_from_the_global_generators() -> None:
    class Drawing(nn.Module):
        """A module during whose first calls another thread draws."""

        calls = 0

        def forward(self, x: Any) -> Any:
            Drawing.calls += 1
            if Drawing.calls < 3:
                thread = threading.Thread(target=random.random)
                thread.start()
                thread.join()
            return x

    chain = Chain([nn.Linear(WIDTH, 2), Drawing()], inputs="x", loss=cross_entropy)
    assert trained(chain).state == "done" and Drawing.calls > 3


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda outputs, batch: outputs, "shape [4, 2], expected one number"),
        (lambda outputs, batch: 1.0, "returned a float"),
        (lambda outputs, batch: outputs.double().mean(), "torch.float64"),
        (lambda outputs, batch: outputs.mean() + batch["z"], "KeyError"),
    ],
)
def test_what_is_no_loss_is_refused(loss: Any, expected: str) -> None:
    with pytest.raises(hydra.HydraError) as caught:
        trained(Chain([nn.Linear(WIDTH, 2)], inputs="x", loss=loss))
    assert expected in str(caught.value) and "`0`" in str(caught.value)


def test_an_error_in_the_middle_of_a_run_fails_its_tasks_with_the_traceback() -> None:
    class Seven(nn.Module):
        def forward(self, x: Any) -> Any:
            if (x == 7).any():
                raise ValueError("seven") from KeyError("the cause")
            return x

    chain = Chain({"seven": Seven(), "last": nn.Linear(WIDTH, 2)}, inputs="x", loss=cross_entropy)
    data = [*rows(20), {"x": torch.full((WIDTH,), 7.0), "y": torch.zeros(1, dtype=torch.long)}, *rows(3)]
    with pytest.raises(hydra.TasksFailed) as caught:
        hydra.select(model=chain, data=data, **(PLAIN | {"lr": [0.1, 0.01], "cuts": [1]})).wait()
    assert len(caught.value.failures) == 2
    for failure in caught.value.failures.values():
        assert "PyTorch module `seven`" in failure and "ValueError: seven" in failure and "Traceback" in failure
        assert "KeyError: 'the cause'" in failure and "direct cause" in failure
    assert trained(chain, rows()).state == "done"


def test_a_chain_is_evaluated_explained_and_searched() -> None:
    data = {"train": rows(), "validation": rows(seed=2)}
    task = trained(perceptron(), data, lr=1e-30)
    evaluated = hydra.evaluate(model=perceptron(), data=data, split="validation", batch=4, device_memory="64MiB")
    assert evaluated["loss"] == task.validation["loss"]
    explained = hydra.explain(model=perceptron(), data=data, batch=4, steps=2, lr=0.1, device_memory="64MiB")
    assert explained
    settings = {key: value for key, value in PLAIN.items() if key != "steps"}
    run = hydra.select(model=perceptron(), data=data, search="halving", trials=3, steps=3, sample={"lr": "log:1e-3..1"}, **settings)
    assert sorted(task.state for task in run.wait().tasks.values()) == ["done", "stopped", "stopped"]


ACTIVE: list[int] = [0, 0]


class Slow(nn.Module):
    """A module that waits, with the interpreter's lock released as in a kernel, and counts the calls at the same time."""

    def forward(self, x: Any) -> Any:
        with LOCK:
            ACTIVE[0] += 1
            ACTIVE[1] = max(ACTIVE)
        time.sleep(0.02)
        with LOCK:
            ACTIVE[0] -= 1
        return x


def test_two_devices_are_in_their_modules_at_the_same_time() -> None:
    chain = Chain({"slow": Slow(), "last": nn.Linear(WIDTH, 2)}, inputs="x", loss=cross_entropy)
    hydra.select(model=chain, data=rows(), **(PLAIN | {"lr": [0.1, 0.01], "devices": "cpu:1x1"})).wait()
    assert ACTIVE == [0, 1]
    hydra.select(model=chain, data=rows(), **(PLAIN | {"lr": [0.1, 0.01], "devices": "cpu:2x1"})).wait()
    assert ACTIVE == [0, 2]


def test_invalid_chains_are_refused_by_name() -> None:
    linear = nn.Linear(WIDTH, 2)
    for modules, expected in [
        ([], "at least one module"),
        ([nn.Linear(2, 2), abs], "`1` is a builtin_function_or_method"),
        ({"a.b": linear}, "no dots"),
        ([nn.Sequential(linear, nn.BatchNorm1d(2, momentum=None))], "`0.1` (BatchNorm1d) has momentum=None"),
        ([nn.Sequential(linear, nn.InstanceNorm1d(2, track_running_stats=True))], "`0.1` (InstanceNorm1d) has running statistics"),
        ([nn.Linear(2, 2).double()], "`0.weight` is of torch.float64"),
        ([nn.Linear(2, 2, device="meta")], "`0.weight` is of torch.float32 on meta, expected float32 on the CPU: make the"),
        (linear, "`modules` is a Linear, expected a list"),
        ([nn.LazyLinear(2)], "`0.weight` is lazy"),
        ([nn.ReLU()], "nothing to train"),
        ({"type": linear}, "that torch.nn.ModuleDict refuses"),
    ]:
        with pytest.raises(hydra.UsageError) as caught:
            Chain(modules, inputs="x")
        assert expected in str(caught.value) and caught.value.keyword == "model"
    with pytest.raises(hydra.UsageError, match="without `loss` the last module returns the loss"):
        Chain([linear], inputs="x", metrics={"accuracy": right})
    assert list(Chain(nn.ModuleDict({"a": linear}), inputs="x").modules) == ["a"]
    with pytest.raises(hydra.UsageError, match="must be those of the modules, not copies"):
        Chain([linear], inputs="x", whole=nn.Linear(WIDTH, 2))


def test_modules_without_a_chain_and_lists_of_them_are_refused() -> None:
    linear = nn.Linear(WIDTH, 2)
    for model, expected in [
        (linear, "`model` is a Linear, expected one chain"),
        ([linear, nn.ReLU()], "`model` has a Linear in a list, expected one chain"),
        ([perceptron()], "`model` has a Chain in a list, expected one chain"),
    ]:
        for command in (hydra.select, hydra.evaluate):
            with pytest.raises(hydra.UsageError, match=expected) as caught:
                command(model=model, data=rows())
            assert caught.value.keyword == "model" and "hydra_train.torch.chain(model)" in str(caught.value)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_modules_and_data_that_raise_are_refused_by_name() -> None:
    def linear(**attributes: Any) -> Any:
        made = nn.Linear(WIDTH, WIDTH)
        for name, value in attributes.items():
            setattr(made, name, value)
        return made

    def buffer() -> Any:
        made = linear()
        made.register_buffer("mask", torch.empty(2, device="meta"))
        return made

    doubled = linear()
    doubled.twice = doubled.weight * 2
    for module, expected in [
        (doubled, "`1.0.twice` was computed by MulBackward0 from parameters"),
        (prune.l1_unstructured(linear(), "weight", 0.5), "`1.0.weight` was computed by MulBackward0"),
        (torch.jit.script(linear()), "`1.0` is a scripted module"),
        (buffer(), "the buffer `1.0.mask` is on meta"),
        (linear(config=types.SimpleNamespace(to_dict=abs)), "the module `1` cannot be identified: TypeError"),
        (linear(lock=threading.Lock()), "the module `1` cannot be copied, as it is for each device: TypeError: cannot pickle '_thread.lock'"),
    ]:
        with pytest.raises(hydra.UsageError) as caught:
            Chain([nn.Linear(WIDTH, WIDTH), nn.Sequential(module), nn.Linear(WIDTH, 2)], inputs="x", loss=cross_entropy).bind(rows())
        assert expected in str(caught.value) and caught.value.keyword == "model"
    for name, error in [("__len__", TypeError("no length")), ("__getitem__", KeyError("a column"))]:
        data = type("Data", (), {"__len__": lambda self: 4, "__getitem__": lambda self, at: rows()[at], name: lambda *_, error=error: raised(error)})
        with pytest.raises(hydra.UsageError, match=f"the validation data cannot be read: {type(error).__name__}: {error}") as refused:
            hydra.select(model=perceptron(), data={"train": rows(), "validation": data()})
        assert refused.value.keyword == "data" and refused.value.__cause__ is error


def raised(error: Exception) -> None:
    raise error


def test_invalid_data_is_refused_by_key() -> None:
    row = rows()[0]
    changing = type("Changing", (), {"__len__": lambda self: 4, "__getitem__": lambda self, at: {"x": torch.full((WIDTH,), random.random())}})()
    for data, expected in [
        (None, "needs `data`"),
        ("builtin", "is a str"),
        ([], "has no items"),
        ([{"z": row["x"]}] * 4, "has no `x`, which the first module gets; it has z"),
        ([row | {"note": "a"}] * 4, "`note` of a batch is a list, expected a tensor: leave it out in `collate`"),
        ([{"x": [1.0, 2.0], "y": row["y"]}] * 4, "with_format"),
        ({"train": None, "test": [row]}, "needs `train`"),
        ([row | {"x": row["x"].double()}] * 4, "torch.float64"),
        ([(row["x"], row["y"])] * 4, "expected a mapping"),
        ({"train": [row], "dev": [row]}, "found train, dev"),
        ({"train": [row], "test": [row | {"z": row["x"]}]}, "all splits have the same tensors"),
        (changing, "differs each time it is read"),
    ]:
        with pytest.raises(hydra.UsageError) as caught:
            hydra.select(model=perceptron(), data=data)
        assert expected in str(caught.value) and caught.value.keyword == "data", expected
    odd = {"x": torch.ones(3), "y": row["y"]}
    with pytest.raises(hydra.HydraError, match="items 0 and 1 of the train data differ in their sizes, and `collate` cannot"):
        trained(perceptron(), [row, odd] * 2)
    flat = row | {"x": torch.ones(1, WIDTH)}
    with pytest.raises(hydra.UsageError, match="must have the same tensors, which may differ in their sizes alone"):
        hydra.select(model=perceptron(), data=[row, flat])
    crossed = [{"x": torch.ones(size, 5 - size), "y": row["y"]} for size in (1, 2, 4)]
    with pytest.raises(hydra.UsageError, match="one item must be the largest in every dimension"):
        hydra.select(model=perceptron(), data=crossed)
    # Few rows of a large dataset are read before a run.
    with pytest.raises(hydra.HydraError, match="stack expects each tensor to be equal size") as late:
        trained(perceptron(), [row] * 1001 + [odd] + [row] * 998, batch=1, steps=1002)
    assert "Traceback" in str(late.value)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"dropout": 0.1}, "--dropout"),
        ({"dropout": [0.1, 0.2]}, "modules of PyTorch"),
        ({"lora": 4}, "modules of PyTorch"),
        ({"context": 8}, "--context"),
        ({"dtype": "bf16"}, "--dtype"),
        ({"train": ["0"]}, "--train"),
        ({"save_dtype": "bf16"}, "save_dtype"),
    ],
)
def test_settings_of_other_models_are_refused(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(hydra.HydraError) as caught:
        trained(perceptron(), **settings)
    assert expected in str(caught.value)


def test_an_interrupted_run_resumes_to_the_same_bits_with_the_same_chain() -> None:
    settings = PLAIN | {"lr": [1e-3, 1e-4], "optimizer": "adamw", "steps": 300}
    plain = hydra.select(model=perceptron(Noise), data=rows(), **settings).wait()
    run = hydra.select(model=perceptron(Noise), data=rows(), checkpoint_every="10", **settings)
    for event in run:
        if event["event"] == "minibatch":
            run.stop()
    directory = run.directory
    with pytest.raises(hydra.UsageError, match="hydra_train.resume\\(dir, model=chain, data=dataset\\)"):
        hydra.resume(directory).wait()
    with pytest.raises(hydra.UsageError, match="this program has `torch:chain-"):
        hydra.resume(directory, model=perceptron(nn.ReLU), data=rows()).wait()
    resumed = hydra.resume(directory, model=perceptron(Noise), data=rows()).wait()
    assert {name: task.weights_sha256 for name, task in resumed.tasks.items()} == {
        name: task.weights_sha256 for name, task in plain.tasks.items()
    }
    module = resumed.tasks["lr1e-3"].load()
    assert torch.equal(module.stages["3"].weight, plain.tasks["lr1e-3"].load().stages["3"].weight)


def test_memory_that_pytorch_takes_is_counted() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 2)

        def forward(self, x: Any) -> Any:
            return self.linear((x.unsqueeze(1).repeat(1, 4096, 1) * 2).sin().mean(1))

    # Four rows, repeated: 16 MiB for each of the three large tensors, since the trained module before it wants its inputs' gradient.
    with pytest.raises(hydra.MemoryRefused) as caught:
        trained(Chain([nn.Linear(WIDTH, WIDTH), Wide()], inputs="x", loss=cross_entropy), device_memory="32MiB", strict=True)
    assert caught.value.needed_bytes > 48 << 20


def test_the_command_line_refuses_to_resume_such_a_run(hydra_program: Path) -> None:
    run = hydra.select(model=perceptron(), data=rows(), **(PLAIN | {"lr": 0.1, "steps": 100_000, "checkpoint_every": "10"}))
    next(event for event in run if event["event"] == "minibatch")
    run.stop()
    run.wait()
    refused = subprocess.run([hydra_program, "resume", str(run.directory)], capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "resume(dir, model=chain, data=dataset)" in refused.stderr


def test_the_package_does_not_import_pytorch() -> None:
    code = "import sys, hydra_train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def tokens(items: int = 16, length: int = 32) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(5)
    found = []
    for item in range(items):
        ids = torch.randint(0, 256, (length,), generator=generator)
        mask = (torch.arange(length) < length - item % 5).long()
        found.append({"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask > 0, ids, -100)})
    return found


CLASSIFIERS = ("Bert", "Roberta", "LlamaClassifier")
TOKENS_OR_SEVERAL = ("BertTokens", "BertSeveral")


def transformers_model(name: str) -> Any:
    transformers = pytest.importorskip("transformers", reason="Transformers is not installed here")
    small: dict[str, Any] = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
    small |= {"num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0}
    if name in ("Llama", "Qwen2", "Qwen3", "Gemma2", "Mixtral", "LlamaClassifier"):
        small |= {"num_key_value_heads": 2, "head_dim": 32}
    if name == "Mixtral":
        small |= {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128}
    if name == "Phi3":
        # Each call writes the frequencies of its length into a buffer.
        rotary = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
        small |= {"eos_token_id": 1, "original_max_position_embeddings": 16, "num_key_value_heads": 2}
        small |= {"rope_parameters": rotary | {"original_max_position_embeddings": 16}}
    if name == "Gemma2":
        small |= {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
    torch.manual_seed(7)
    if name == "GPT2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=256, n_positions=64, n_embd=128, n_layer=4, n_head=4))
    if name == "BertSeveral":
        small |= {"problem_type": "multi_label_classification", "num_labels": 3}
    kind = "ForSequenceClassification" if name in (*CLASSIFIERS, "BertSeveral") else "ForCausalLM"
    kind = "ForTokenClassification" if name == "BertTokens" else kind
    family = name.removesuffix("Classifier").removesuffix("Tokens").removesuffix("Several")
    return getattr(transformers, family + kind)(getattr(transformers, f"{family}Config")(**small))


EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.mark.parametrize("name", ["network", "gpt2", "gemma", "bert", "mixtral"])
def test_a_killed_example_resumes_to_the_bits_of_one_device_and_the_losses_of_pytorch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name != "network":
        pytest.importorskip("transformers", reason="Transformers is not installed here")
    monkeypatch.syspath_prepend(EXAMPLES)
    import torch_models

    program = [sys.executable, str(EXAMPLES / "torch_models.py"), name, "--out", str(tmp_path / "run")]
    killed = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    events = tmp_path / "run" / "metrics.jsonl"
    while not events.exists() or events.read_text().count('"minibatch"') < 24:
        assert killed.poll() is None, "the example ended before it was killed"
        time.sleep(0.02)
    killed.kill()
    killed.wait()
    resumed = subprocess.run(program, check=True, capture_output=True, text=True).stdout

    plain = torch_models.train(name, devices="cpu:1x1", device_memory="64MiB").wait().tasks
    assert len(plain) == 4 and all(task.report["shards"] == 1 for task in plain.values())
    shown = re.findall(r"^(\S+): validation loss \S+, (\d+) shards, weights (\w+)$", resumed, re.MULTILINE)
    assert {task: weights for task, _, weights in shown} == {task: each.weights_sha256 for task, each in plain.items()}
    assert all(int(shards) > 1 for _, shards, _ in shown)

    for task in plain.values():
        chain, data = torch_models.job(name)
        model = chain.whole or Chained(chain.modules)
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=task.differs["lr"], weight_decay=0.01), []
        for step in range(16):
            batch = torch.utils.data.default_collate([data["train"][(4 * step + at) % 32] for at in range(4)])
            loss = cross_entropy(model(batch["x"]), batch) if name == "network" else model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert task.losses == pytest.approx(losses, rel=1e-5)


def test_the_cells_of_the_notebook_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="Transformers is not installed here")
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES), prepend=os.pathsep)
    cells = json.loads((EXAMPLES / "torch_models.ipynb").read_text())["cells"]
    program = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    printed = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert len(re.findall(r"^\w+: lr\S+, validation loss \d+\.\d+, [2-9] shards$", printed, re.MULTILINE)) == 5, printed


@pytest.mark.parametrize("name", ["GPT2", "Llama", "Qwen2", "Qwen3", "Gemma2", "Phi3", "Mixtral", *TOKENS_OR_SEVERAL, *CLASSIFIERS])
def test_a_cut_model_trains_as_the_whole_one_in_pytorch(name: str, tmp_path: Path) -> None:
    from hydra_train.torch import chain

    model, data = transformers_model(name), tokens()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for attention in model.modules():
        attention.dropout_prob = 0.0
    if name in CLASSIFIERS:
        data = [row | {"labels": row["labels"][:1] % 2} for row in data]
    if name == "BertSeveral":
        data = [row | {"labels": (row["labels"][:3] % 2).float()} for row in data]
    if name == "BertTokens":
        data = [row | {"labels": torch.where(row["labels"] < 0, -100, row["labels"] % 2)} for row in data]
    task = trained(chain(model), data, lr=0.01, steps=4, weight_decay=0)
    loaded, whole = task.load(), transformers_model(name).eval()
    assert type(loaded) is type(model)
    losses = plain_losses(whole.parameters(), lambda batch: whole(**batch).loss, data, steps=4, lr=0.01)
    assert task.losses == pytest.approx(losses, rel=1e-5)
    # Each half is weighted by its targets, which differ.
    assert trained(chain(model), data, lr=0.01, steps=4, weight_decay=0, accumulate=2).losses == pytest.approx(losses, rel=1e-5)
    for (at, found), wanted in zip(loaded.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5, msg=at)
    loaded.save_pretrained(tmp_path)
    batch = torch.utils.data.default_collate(data[:2])
    with torch.no_grad():
        assert torch.equal(type(model).from_pretrained(tmp_path).eval()(**batch).logits, loaded.eval()(**batch).logits)


def test_prompts_that_peft_tunes_are_refused() -> None:
    from hydra_train.torch import chain

    peft = pytest.importorskip("peft", reason="PEFT is not installed here")
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(hydra.UsageError, match="cannot be cut"):
        chain(peft.get_peft_model(transformers_model("GPT2"), settings))


def padded(items: list[Any]) -> Any:
    """Pads a batch to its longest item."""
    length = max(len(item["input_ids"]) for item in items)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    pad = functional.pad
    return {key: torch.stack([pad(item[key], (0, length - len(item[key])), value=fill[key]) for item in items]) for key in fill}


def test_batches_are_padded_to_their_longest_item() -> None:
    from hydra_train.torch import chain

    data = [{key: each[: 8 + 5 * at % 24] for key, each in row.items()} for at, row in enumerate(tokens())]
    splits = {"train": data, "validation": data[:5]}
    model = transformers_model("GPT2")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    settings: dict[str, Any] = {"lr": 0.01, "steps": 4, "weight_decay": 0}
    whole, cut = (trained(chain(model, collate=padded), splits, **settings, **more) for more in ({}, {"cuts": [1, 2], "devices": "cpu:2x1"}))
    assert (whole.losses, whole.weights_sha256) == (cut.losses, cut.weights_sha256)
    plain = transformers_model("GPT2").eval()
    optimizer, losses = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9), []
    for step in range(4):
        loss = plain(**padded(data[step * 4 : step * 4 + 4])).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert whole.losses == pytest.approx(losses, rel=1e-5)
    # An item of the validation data may be the largest of all.
    assert trained(chain(model, collate=padded), {"train": data[1:5], "validation": data}, **settings, batch=2).report["validation"]


@pytest.mark.parametrize("name", ["GPT2", "Llama", "Bert", "LlamaClassifier"])
def test_adapters_of_peft_train_as_in_pytorch(name: str, tmp_path: Path) -> None:
    from hydra_train.torch import chain

    peft = pytest.importorskip("peft", reason="PEFT is not installed here")
    targets = {"GPT2": ["c_attn"], "Llama": ["q_proj", "v_proj"], "Bert": ["query", "value"], "LlamaClassifier": ["q_proj"]}[name]
    is_classifier = name in CLASSIFIERS

    def adapted() -> Any:
        base = transformers_model(name)
        for module in base.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        torch.manual_seed(1)
        task = "SEQ_CLS" if is_classifier else "CAUSAL_LM"
        return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, task_type=task))

    data = [row | {"labels": row["labels"][:1] % 2} for row in tokens()] if is_classifier else tokens()
    whole, cut = (trained(chain(adapted()), data, lr=0.01, steps=4, **more) for more in ({}, {"cuts": [1, 2], "devices": "cpu:2x1"}))
    assert (whole.losses, whole.weights_sha256) == (cut.losses, cut.weights_sha256)
    plain, loaded = adapted().eval(), whole.load()
    own = [each for each in plain.parameters() if each.requires_grad]
    assert whole.losses == pytest.approx(plain_losses(own, lambda batch: plain(**batch).loss, data, steps=4, lr=0.01), rel=1e-5)
    assert type(loaded) is type(plain)
    loaded.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()
    for (at, found), wanted in zip(loaded.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5, msg=at)


def test_metrics_of_a_cut_model_read_its_outputs() -> None:
    from hydra_train.torch import chain

    def accuracy(outputs: Any, batch: Any) -> Any:
        return (outputs.logits.argmax(-1) == batch["labels"].reshape(-1)).sum()

    data = [row | {"labels": row["labels"][:1] % 2} for row in tokens()]
    splits = {"train": data, "validation": data[:6]}
    for name in CLASSIFIERS:
        model = chain(transformers_model(name), metrics={"accuracy": accuracy})
        task = trained(model, splits, lr=0.01, steps=2, metric="accuracy", cuts=[2])
        batch = torch.utils.data.default_collate(data[:6])
        with torch.no_grad():
            outputs = task.load().eval()(**batch)
        assert task.report["validation"]["metrics"] == {"accuracy": accuracy(outputs, batch).item() / 6}


def test_what_a_model_has_that_no_part_computes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra_train.torch import chain

    transformers = pytest.importorskip("transformers", reason="Transformers is not installed here")
    routed = transformers_model("Mixtral")
    routed.config.output_router_logits = True
    # As a model of another class, whose routers Transformers does not record in its base model.
    monkeypatch.setattr(type(routed.model), "_can_record_outputs", {})
    small = {"vocab_size": 256, "embedding_size": 32, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    projected = transformers.ElectraForSequenceClassification(transformers.ElectraConfig(**small))
    several = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=256, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4))
    for model, expected in [
        (routed, "cannot be cut: its configuration has `output_router_logits=True`"),
        (projected, "cannot be cut: it has `embeddings_project` besides its embeddings"),
        (several, "it has an encoder and a decoder"),
    ]:
        with pytest.raises(hydra.UsageError, match=expected):
            chain(model)


def test_a_model_that_is_cut_wrongly_is_refused() -> None:
    from hydra_train.torch import chain

    model = transformers_model("Llama")
    with pytest.raises(hydra.UsageError, match="not built like"):
        chain(nn.Linear(2, 2))
    with pytest.raises(hydra.UsageError, match="begins with input_ids and has labels"):
        chain(model, inputs=["input_ids"])
    with pytest.raises(hydra.UsageError, match="passes no `position_ids` on"):
        chain(model, inputs=["input_ids", "position_ids", "labels"])
    scaled = type("Scaled", (type(model.model),), {"forward": lambda self, *a, **k: _doubled(super(type(self), self).forward(*a, **k))})
    model.model.__class__ = scaled
    with pytest.raises(hydra.UsageError, match="cannot be cut: the loss of its parts is"):
        chain(model)


def _doubled(outputs: Any) -> Any:
    outputs.last_hidden_state = outputs.last_hidden_state * 2
    return outputs


def first_loss(run: Any) -> float:
    return float(next(iter(run.wait().tasks.values())).losses[0])


def test_runs_at_the_same_time_train_their_own_models() -> None:
    def scaled(scale: float) -> Chain:
        torch.manual_seed(0)
        modules = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2)]
        loss = ScaledLoss(scale)
        return Chain(modules, inputs="x", loss=loss)

    first, second = (hydra.select(model=scaled(scale), data=rows(), lr=0.1, **PLAIN) for scale in (1.0, 0.5))
    assert first_loss(second) == 0.5 * first_loss(first)


class ScaledLoss:
    """A loss with a scale that the name of a model does not show, because an object of another class has it."""

    def __init__(self, scale: float) -> None:
        self.of = types.SimpleNamespace(scale=scale)

    def __call__(self, outputs: Any, batch: Any) -> Any:
        return self.of.scale * cross_entropy(outputs, batch)


class WeightedLoss:
    """A loss with an attribute."""

    def __init__(self, weight: Any) -> None:
        self.weight = weight

    def __call__(self, outputs: Any, batch: Any) -> Any:
        return (self.weight * cross_entropy(outputs, batch)).sum()


class Smoothed(nn.CrossEntropyLoss):
    """A loss that is a module."""

    def __init__(self, smoothing: float) -> None:
        super().__init__(label_smoothing=smoothing)

    def forward(self, outputs: Any, batch: Any) -> Any:
        return super().forward(outputs, batch["y"].reshape(-1))


def test_what_decides_a_model_is_in_its_name() -> None:
    class Power(nn.Module):
        def __init__(self, exponent: int, scale: dict[str, Any], path: str) -> None:
            super().__init__()
            self._exponent, self.scale = exponent, scale
            self.config = types.SimpleNamespace(to_dict=lambda: {"rope": {"scale": scale["by"]}, "_name_or_path": path})

        def forward(self, x: Any) -> Any:
            return self.scale["by"] * x**self._exponent

    def weighted(weight: float) -> Callable[[Any, Any], Any]:
        return lambda outputs, batch: weight * cross_entropy(outputs, batch)

    def own(outputs: Any, batch: Any, *, weight: float = 1.0) -> Any:
        return weight * cross_entropy(outputs, batch)

    def named(exponent: int = 1, loss: Any = cross_entropy, scale: Any = None, path: str = "a") -> str:
        torch.manual_seed(0)
        modules = [Power(exponent, scale or {"by": 1, "to": 2}, path), nn.Linear(WIDTH, 2)]
        return Chain(modules, inputs="x", loss=loss)._identity()

    assert named() == named(scale={"to": 2, "by": 1}, path="b")
    different = [named(), named(2), named(loss=weighted(1.0)), named(loss=weighted(0.5)), named(scale={"by": 3, "to": 2})]
    different += [named(loss=own), named(loss=partial(own, weight=0.5)), named(loss=partial(own, weight=0.25))]
    own.__kwdefaults__ = {"weight": 2.0}
    different.append(named(loss=own))

    # Attributes of objects that are called, and tensors.
    different += [named(loss=WeightedLoss(weight)) for weight in (0.5, torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))]
    different += [named(loss=WeightedLoss(weight).__call__) for weight in (0.5, 0.25)]
    different += [named(loss=weighted(weight)) for weight in (torch.tensor(0.5), torch.tensor(0.25))]
    different += [named(loss=Smoothed(smoothing)) for smoothing in (0.1, 0.2)]
    assert len(set(different)) == len(different) == 18
    for of in (partial(weighted, 0.5), partial(weighted, torch.tensor(0.5)), partial(WeightedLoss, torch.tensor([1.0, 2.0]))):
        assert named(loss=of()) == named(loss=of())


def test_code_that_the_program_changes_is_in_the_name_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubling(nn.Module):
        def forward(self, x: Any) -> Any:
            return helper(x)

    def named() -> str:
        torch.manual_seed(0)
        return Chain([Doubling(), nn.Linear(WIDTH, 2)], inputs="x", loss=cross_entropy)._identity()

    def helper(x: Any) -> Any:
        return 2 * x

    before = named()
    assert named() == before
    helper.__code__ = (lambda x: 3 * x).__code__
    changed = named()
    monkeypatch.setattr(Doubling, "forward", lambda self, x: helper(x) + 1)
    again = named()
    assert len({before, changed, again}) == 3 and named() == again


def test_hooks_shared_memory_and_later_changes_of_parameters_are_refused() -> None:
    def linears() -> list[Any]:
        return [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)]

    def refused(modules: list[Any], expected: str) -> None:
        with pytest.raises(hydra.UsageError, match=expected):
            Chain(modules, inputs="x", loss=cross_entropy)

    hooked = linears()
    hooked[0].weight.register_hook(lambda gradient: 0 * gradient)
    refused(hooked, "`0.weight` has a hook on its gradient")
    tied = linears()
    tied[1].weight.data = tied[0].weight.data
    refused(tied, "`0.weight` and `1.weight` are different tensors in the same memory")
    kept = linears()
    kept[0].register_buffer("start", kept[2].weight.detach()[0])
    refused(kept, "are different tensors in the same memory")
    for change, expected in [
        (lambda linear: linear.double(), "`0.weight` is of torch.float64"),
        (lambda linear: linear.to("meta"), "`0.weight` is of torch.float32 on meta"),
        (lambda linear: linear.bias.register_post_accumulate_grad_hook(print), "`0.bias` has a hook on its gradient"),
    ]:
        later = linears()
        chain = Chain(later, inputs="x", loss=cross_entropy)
        change(later[0])
        with pytest.raises(hydra.UsageError, match=expected):
            hydra.select(model=chain, data=rows(), lr=0.1, **PLAIN)


def test_a_loss_without_a_gradient_is_refused() -> None:
    chain = perceptron()
    chain.loss = lambda outputs, batch: cross_entropy(outputs.detach(), batch)
    with pytest.raises(hydra.HydraError, match="the loss does not depend on the parameters"):
        trained(chain)


@pytest.mark.parametrize("kind", ["dict", "list", "nested", "written"])
def test_state_in_containers_is_refused(kind: str) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.state: Any = {"dict": {"calls": 0}, "list": [], "nested": [deque([0], 8)]}.get(kind, {"sums": [torch.zeros(1)]})

        def forward(self, x: Any) -> Any:
            if kind == "dict":
                self.state["calls"] += 1
            elif kind == "nested":
                self.state[0].append(1)
            elif kind == "written":
                self.state["sums"][0] += 1
            else:
                self.state.append(x)
            return self.linear(x)

    with pytest.raises(hydra.HydraError, match="changes its attribute `state`"):
        trained(Chain([Counting(), nn.Linear(WIDTH, 2)], inputs="x", loss=cross_entropy))


def test_containers_that_a_forward_reads_and_a_recurrent_module_of_ones_own_are_trained() -> None:
    class Recurrent(nn.LSTM):
        def __init__(self) -> None:
            super().__init__(WIDTH // 8, 32, batch_first=True)
            self.state = {"sizes": [8, [WIDTH // 8]], "mask": torch.ones(32), "names": {"x"}}

        def forward(self, x: Any) -> Any:
            return super().forward(x.reshape(-1, self.state["sizes"][0], WIDTH // 8))[0][:, -1] * self.state["mask"]

    assert trained(Chain([Recurrent(), nn.Linear(32, 2)], inputs="x", loss=cross_entropy)).state == "done"
