"""Runs of modules of PyTorch: more kinds of models, the bits of a plain loop, and every feature that a run of Hydra's own models has."""

from __future__ import annotations

import json
import os
import random
import re
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import hydra_train as hydra

torch = pytest.importorskip("torch", reason="PyTorch is not installed here")

import numpy  # noqa: E402

from conftest import until_end  # noqa: E402
from hydra_train.torch import Chained, chain  # noqa: E402
from test_torch import PLAIN, cross_entropy, normalized, perceptron, plain_losses, right, rows, tokens, trained, transformers_model  # noqa: E402

nn, functional = torch.nn, torch.nn.functional
ADAMW: dict[str, Any] = PLAIN | {"optimizer": "adamw", "weight_decay": 0.01, "lr": 1e-3}


# Models of Transformers that `test_torch.py` does not have.

SMALL: dict[str, Any] = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1}
IMAGES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGES |= {"image_size": 16, "patch_size": 4, "num_labels": 3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("ForImageClassification", IMAGES),
    "Phi": ("ForCausalLM", SMALL),
    "GPTNeoX": ("ForCausalLM", SMALL),
    "OPT": ("ForCausalLM", SMALL | {"ffn_dim": 256, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "DistilBert": ("ForSequenceClassification", {"vocab_size": 256, "dim": 64, "hidden_dim": 256, "n_layers": 2, "n_heads": 4}),
    "ModernBert": ("ForSequenceClassification", SMALL | {"cls_token_id": 1, "sep_token_id": 2}),
}


def model_of(name: str, **settings: Any) -> Any:
    """Returns a model with weights that are always the same."""
    if name not in MODELS:
        return transformers_model(name)
    transformers = pytest.importorskip("transformers", reason="Transformers is not installed here")
    kind, config = MODELS[name]
    torch.manual_seed(7)
    return getattr(transformers, name + kind)(getattr(transformers, f"{name}Config")(**(config | settings)))


def without_dropout(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def images(items: int = 16) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(5)
    pixels = torch.randn(items, 3, 16, 16, generator=generator)
    return [{"pixel_values": each, "labels": torch.tensor([at % 3])} for at, each in enumerate(pixels)]


#: Device memory for less than a model.
BUDGETS = {"ViT": "2MiB", "Phi": "3.25MiB", "GPTNeoX": "3.25MiB", "OPT": "3.25MiB", "DistilBert": "3.25MiB", "ModernBert": "3.5MiB"}


def data_of(name: str) -> list[dict[str, Any]]:
    if name == "ViT":
        return images()
    if name in ("DistilBert", "ModernBert", "Bert"):
        return [row | {"labels": row["labels"][:1] % 2} for row in tokens()]
    return tokens()


@pytest.mark.parametrize("name", list(MODELS))
def test_more_models_train_as_in_pytorch_and_to_the_same_bits_when_cut(name: str, tmp_path: Path) -> None:
    model, data = without_dropout(model_of(name)), data_of(name)
    whole = trained(chain(model), data, **(ADAMW | {"steps": 4}))
    cut = trained(chain(model), data, **(ADAMW | {"steps": 4, "devices": "cpu:2x1", "device_memory": BUDGETS[name]}))
    assert whole.report["shards"] == 1 < cut.report["shards"]
    assert (whole.losses, whole.weights_sha256) == (cut.losses, cut.weights_sha256)
    plain = without_dropout(model_of(name)).train()
    # The weight decay is 0.01 by default.
    losses = plain_losses(plain.parameters(), lambda batch: plain(**batch).loss, data, 4, 1e-3, torch.optim.AdamW)
    assert whole.losses == pytest.approx(losses, rel=1e-5)
    exact = without_dropout(model_of(name)).train()
    assert whole.losses == plain_loop(exact, lambda batch: exact(**batch).loss, data, [1e-3] * 4)
    loaded = cut.load()
    assert_same_bits(loaded, exact)
    loaded.save_pretrained(tmp_path)
    batch = torch.utils.data.default_collate(data[:2])
    with torch.no_grad():
        assert torch.equal(type(model).from_pretrained(tmp_path).eval()(**batch).logits, loaded.eval()(**batch).logits)


def test_a_cut_changes_no_statistics_of_the_given_model() -> None:
    model = model_of("Phi")
    # Over the positions of a sequence: the example has twelve.
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, nn.BatchNorm1d(12))
    before = {name: each.clone() for name, each in model.named_buffers()}
    chain(model)
    assert "model.layers.0.mlp.1.running_mean" in before
    for name, each in model.named_buffers():
        assert torch.equal(each, before[name]), name


def test_draws_and_metrics_of_an_image_classifier() -> None:
    def accuracy(outputs: Any, batch: Any) -> Any:
        return (outputs.logits.argmax(-1) == batch["labels"].reshape(-1)).sum()

    model = model_of("ViT", hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2)
    data = {"train": images(), "validation": images()[:6]}
    made = chain(model, metrics={"accuracy": accuracy})
    whole, cut = (trained(made, data, **(ADAMW | {"steps": 4} | more)) for more in ({}, {"cuts": [1, 2], "devices": "cpu:2x1"}))
    assert (whole.losses, whole.weights_sha256) == (cut.losses, cut.weights_sha256)
    batch = torch.utils.data.default_collate(data["validation"])
    with torch.no_grad():
        outputs = whole.load().eval()(**batch)
    assert whole.report["validation"]["metrics"] == {"accuracy": accuracy(outputs, batch).item() / 6}


def test_models_that_are_not_cut_are_refused_by_what_they_have() -> None:
    transformers = pytest.importorskip("transformers", reason="Transformers is not installed here")
    t5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    bloom = transformers.BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2)
    for model, expected in [
        (transformers.T5EncoderModel(transformers.T5Config(**t5)), "T5EncoderModel` is not built like .* it has no head, which computes a loss"),
        (transformers.T5ForSequenceClassification(transformers.T5Config(**t5)), "it has an encoder and a decoder"),
        (transformers.BloomForCausalLM(bloom), "its BloomModel has `word_embeddings`"),
        (transformers.BertForQuestionAnswering(transformers.BertConfig(**SMALL)), "returns no loss for `labels`"),
    ]:
        with pytest.raises(hydra.UsageError, match=expected):
            chain(model)
    with pytest.raises(hydra.UsageError, match="begins with pixel_values and has labels"):
        chain(model_of("ViT"), inputs=["input_ids", "labels"])
    model = model_of("Phi").train()

    class Dropped(type(model.model)):
        """Draws after the blocks, so that each part would."""

        def forward(self, *given: Any, **more: Any) -> Any:
            outputs = super().forward(*given, **more)
            outputs.last_hidden_state = functional.dropout(outputs.last_hidden_state, 0.5, self.training)
            return outputs

    model.model.__class__ = Dropped
    with pytest.raises(hydra.UsageError, match="cannot be cut: in training the loss of its parts is"):
        chain(model)
    assert all(each.training for each in model.modules())


# The plain loop with Hydra's arithmetic.


def fused(a: Any, b: Any, c: Any) -> Any:
    """Returns a * b + c of float32, rounded once."""
    exact, c = a.astype(numpy.float64) * b.astype(numpy.float64), numpy.asarray(c, numpy.float64)
    total = exact + c
    part = total - exact
    rest = (exact - (total - part)) + (c - part)
    # Rounded to odd: the rounding to float32 that follows is then that of the exact sum.
    is_even = total.view(numpy.int64) & 1 == 0
    odd = numpy.nextafter(total, numpy.where(rest > 0, numpy.inf, -numpy.inf))
    return numpy.where((rest != 0) & is_even, odd, total).astype(numpy.float32)


def power(base: float, exponent: int) -> float:
    """Returns a power by repeated squaring, as compiled code computes it."""
    result = 1.0
    while exponent:
        result *= base if exponent & 1 else 1.0
        base, exponent = base * base, exponent >> 1
    return result


class AdamW:
    """AdamW in the order of operations of ``hydra-core/src/optimizer/adamw.rs``, in float32."""

    def __init__(self, parameters: Iterable[Any], weight_decay: float = 0.01) -> None:
        self.parameters, self.weight_decay, self.steps = list(parameters), weight_decay, 0
        self.moments = [[numpy.zeros(tuple(each.shape), numpy.float32) for _ in range(2)] for each in self.parameters]

    def step(self, lr: float) -> None:
        self.steps += 1
        single, beta1, beta2 = numpy.float32, 0.9, 0.999
        step_size = single(lr / (1 - power(beta1, self.steps)))
        root = single(numpy.sqrt(1 - power(beta2, self.steps)))
        shrink, rest1, rest2 = single(1 - lr * self.weight_decay), single(1 - beta1), single(1 - beta2)
        for parameter, moments in zip(self.parameters, self.moments, strict=True):
            p, g = parameter.detach().numpy(), parameter.grad.numpy()
            m = fused(single(beta1), moments[0], rest1 * g)
            v = fused(single(beta2), moments[1], rest2 * (g * g))
            p[...] = fused(-step_size, m / (numpy.sqrt(v) / root + single(1e-8)), p * shrink)
            moments[:] = m, v


def plain_loop(module: Any, loss_of: Callable[[Any], Any], data: Any, rates: Iterable[float]) -> list[float]:
    """Trains on four rows a step, with a learning rate for each, and returns the losses."""
    parameters = [each for each in module.parameters() if each.requires_grad]
    optimizer, losses, threads = AdamW(parameters), [], torch.get_num_threads()
    torch.set_num_threads(1)
    for step, rate in enumerate(rates):
        batch = torch.utils.data.default_collate([data[(step * 4 + at) % len(data)] for at in range(4)])
        module.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        optimizer.step(rate)
        losses.append(loss.item())
    torch.set_num_threads(threads)
    return losses


def assert_same_bits(found: Any, expected: Any) -> None:
    for (name, each), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(each, other), name


def test_the_rounding_of_the_plain_loop_is_that_of_one_operation() -> None:
    # The product is 1 + 2^-11 + 2^-24, half a unit in the last place over a number of float32.
    factor = numpy.array([1 + 2**-12], numpy.float32)
    for added, expected in [(0, 1 + 2**-11), (2**-60, 1 + 2**-11 + 2**-23), (-(2**-60), 1 + 2**-11), (-1, 2**-11 + 2**-24)]:
        assert fused(factor, factor, numpy.float32(added))[0] == numpy.float32(expected)


@pytest.mark.parametrize("name", ["perceptron", "GPT2"])
def test_the_plain_loop_with_the_same_arithmetic_has_the_same_bits(name: str) -> None:
    is_own = name == "perceptron"
    made = perceptron() if is_own else chain(without_dropout(model_of(name)))
    data = rows() if is_own else tokens()
    plain = Chained(perceptron().modules) if is_own else without_dropout(model_of(name)).train()
    losses = plain_loop(plain, lambda batch: cross_entropy(plain(batch["x"]), batch) if is_own else plain(**batch).loss, data, [1e-3] * 4)
    task = trained(made, data, **(ADAMW | {"steps": 4, "cuts": [2]}))
    assert task.losses == losses
    assert_same_bits(task.load(), plain)


# Features of a run.


def hashes(run: Any) -> dict[str, str]:
    return {name: task.weights_sha256 for name, task in run.tasks.items()}


def test_a_hugging_face_dataset_has_the_bits_of_its_rows_and_resumes() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets of Hugging Face is not installed here")

    def splits() -> Any:
        table = datasets.Dataset.from_dict({key: [row[key].tolist() for row in rows()] for key in ("x", "y")})
        return datasets.DatasetDict({"train": table, "validation": table.select(range(6))})

    expected = trained(perceptron(), {"train": rows(), "validation": rows()[:6]})
    found = trained(perceptron(), splits().with_format("torch"))
    assert (found.losses, found.weights_sha256, found.validation) == (expected.losses, expected.weights_sha256, expected.validation)
    # A collate function makes the tensors of a dataset without a format.
    stacked = perceptron(collate=lambda items: {key: torch.tensor([item[key] for item in items]) for key in items[0]})
    assert trained(stacked, splits()).weights_sha256 == expected.weights_sha256
    with pytest.raises(hydra.UsageError, match="with_format"):
        trained(perceptron(), splits())
    settings = PLAIN | {"lr": 1e-3, "steps": 300}
    run = hydra.select(model=perceptron(), data=splits().with_format("torch"), checkpoint_every="10", **settings)
    next(event for event in run if event["event"] == "minibatch")
    run.stop()
    run.wait()
    resumed = hydra.resume(run.directory, model=perceptron(), data=splits().with_format("torch")).wait()
    assert hashes(resumed) == hashes(hydra.select(model=perceptron(), data=rows(), **settings).wait())


def test_masters_on_the_disk_have_the_bits_of_those_in_memory(tmp_path: Path) -> None:
    settings = ADAMW | {"lr": [1e-2, 1e-3], "steps": 4}
    disk = tmp_path / "disk"
    disk.mkdir()
    in_memory = hydra.select(model=perceptron(normalized, depth=12), data=rows(), **settings).wait()
    small = {"host_memory": "6MiB", "disk_memory": "64MiB", "disk": disk, "device_memory": "3MiB"}
    on_disk = hydra.select(model=perceptron(normalized, depth=12), data=rows(), **(settings | small)).wait()
    assert hashes(on_disk) == hashes(in_memory)
    assert all(task.report["disk_bytes"] > 0 and task.report["shards"] > 1 for task in on_disk.tasks.values())
    assert on_disk.report["transfers"]["disk_read_bytes"] > 0 < on_disk.report["transfers"]["disk_written_bytes"]
    assert on_disk.report["host_peak_bytes"] <= 6 << 20
    assert not list(disk.iterdir()), "a file is left on the disk"


def test_a_fork_has_the_bits_of_a_plain_loop_that_changes_the_rate() -> None:
    settings = ADAMW | {"steps": 1_000_000}
    run = hydra.select(model=perceptron(depth=2), data=rows(), reserve_for_forks=True, **settings)
    next(event for event in run if event["event"] == "minibatch")
    task = next(iter(run.tasks.values()))
    place = task.pause()
    same, slower = task.fork(name="same", steps=place + 4), task.fork(name="slower", lr=1e-4, steps=place + 4)
    until_end(run, "same", "slower")
    run.stop()
    run.wait()
    for fork, rate in [(same, 1e-3), (slower, 1e-4)]:
        plain = Chained(perceptron(depth=2).modules)
        losses = plain_loop(plain, lambda batch: cross_entropy(plain(batch["x"]), batch), rows(), [1e-3] * place + [rate] * 4)
        assert fork.losses[place:] == losses[place:]
        assert_same_bits(fork.load(), plain)


def test_the_dashboard_shows_losses_and_metrics(capfd: pytest.CaptureFixture[str]) -> None:
    data, settings = {"train": rows(), "validation": rows(8, seed=2)}, ADAMW | {"steps": 1_000_000, "eval_every": 2}
    run = hydra.select(model=perceptron(metrics={"accuracy": right}), data=data, serve="127.0.0.1:0", **settings)
    evaluated = next(event for event in run if event["event"] == "evaluation" and event["kind"] == "periodic")
    assert evaluated["loss"] > 0 and set(evaluated["metrics"]) == {"accuracy"}
    # The dashboard has every loss of a task that is not long.
    next(iter(run.tasks.values())).pause()
    address = re.search(r"http://127\.0\.0\.1:\d+", capfd.readouterr().err)
    assert address is not None

    def shown(path: str) -> Any:
        with urllib.request.urlopen(f"{address.group()}/api/runs{path}", timeout=60) as answer:
            return json.load(answer)

    (listed,) = shown("")
    page = shown(f"/{urllib.parse.quote(listed['name'], safe='')}")
    run.stop()
    (task,) = run.wait().tasks.values()
    (curve,), (row,) = page["curves"], page["tasks"]
    assert len(curve["losses"]) >= evaluated["step"] and curve["losses"] == task.losses[: len(curve["losses"])]
    found = dict(row["evaluations"])[evaluated["step"]]
    assert (found["loss"], found["metrics"]) == (evaluated["loss"], evaluated["metrics"])


@pytest.mark.parametrize("cuts", [[], [2]], ids=["whole", "cut"])
def test_explain_trains_nothing_and_predicts_the_peak_of_a_device(cuts: list[int]) -> None:
    made, settings = perceptron(), ADAMW | {"device_memory": "3.25MiB", "cuts": cuts or None}
    parameters = [each for module in made.modules.values() for each in module.parameters()]
    before = [(each.clone(), each._version) for each in parameters]
    explained = hydra.explain(model=made, data=rows(), **settings)
    assert not Path("runs").exists()
    assert all(torch.equal(each, value) and each._version == version for each, (value, version) in zip(parameters, before, strict=True))
    shards = explained["tasks"][0]["shard_needs"]
    assert [(shard["first"], shard["end"]) for shard in shards] == list(zip([0, *cuts], [*cuts, 4]))
    assert all(0 < shard["verified_bytes"] <= shard["peak_bytes"] < 1.1 * shard["verified_bytes"] for shard in shards)
    assert explained["times"]["running_s"] > 0 and explained["prediction"]["makespan_s"] > 0

    (device,) = hydra.select(model=made, data=rows(), **settings).wait().report["devices"]
    predicted = explained["prediction"]["devices"][0]["peak_bytes"]
    assert device["peak_measured"] and device["peak_bytes"] <= min(device["budget_bytes"], 1.05 * predicted)
    # Whether the next shard is promoted before the peak of this one depends on the moment.
    least = max(shard["verified_bytes"] for shard in shards) if cuts else predicted
    assert device["peak_bytes"] >= 0.95 * least


class Hoarding(nn.Module):
    """Takes memory that is in no tensor."""

    def forward(self, x: Any) -> Any:
        return x + float(numpy.ones(160 << 17).min() - 1.0)


def test_the_memory_of_the_process_is_compared_with_what_was_reserved(capfd: pytest.CaptureFixture[str]) -> None:
    run = hydra.select(model=perceptron(), data=rows(), **ADAMW).wait()
    memory, devices = run.report["process"], run.report["devices"]
    assert memory["reserved_peak_bytes"] == run.report["host_peak_bytes"] + sum(device["peak_bytes"] for device in devices)
    grown = memory["peak_bytes"] - memory["start_bytes"]
    assert 0 <= grown <= 1.05 * memory["reserved_peak_bytes"] + (64 << 20)
    assert "this process took" not in capfd.readouterr().err

    run = hydra.select(model=perceptron(Hoarding), data=rows(), **ADAMW).wait()
    memory = run.report["process"]
    assert memory["peak_bytes"] - memory["start_bytes"] >= 128 << 20
    assert re.search(r"note: this process took [0-9.]+ MiB more memory while the run trained, .* reserved: memory that modules", capfd.readouterr().err)


def spread(outputs: Any, _: Any) -> Any:
    return (outputs[:, 0] - outputs[:, 1]).abs().sum()


def test_a_search_stops_the_trials_with_the_worse_metric() -> None:
    data, settings = {"train": rows(), "validation": rows(8, seed=2)}, {key: value for key, value in ADAMW.items() if key != "lr"}
    made = perceptron(metrics={"spread": (spread, "min")})
    rates = {"lr": "log:1e-5..1e-2"}
    run = hydra.select(model=made, data=data, **(settings | {"steps": 9, "metric": "spread"}), search="halving", trials=6, sample=rates).wait()
    found = {name: dict(task.report["evaluations"])[3] for name, task in run.tasks.items()}
    kept = {name for name, task in run.tasks.items() if task.state == "done"}
    by_metric = sorted(found, key=lambda name: found[name]["metrics"]["spread"])
    assert kept == set(by_metric[:2]) and len(found) == 6
    assert kept != set(sorted(found, key=lambda name: found[name]["loss"])[:2])
    assert run.best.validation["metrics"]["spread"] == min(run.tasks[name].validation["metrics"]["spread"] for name in kept)


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> str:
    """The path from which workers of Ray import the functions of a chain, also in the environment."""
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PYTHONPATH", paths)
    return paths


def test_a_cluster_trains_a_grid_of_a_chain_to_the_same_bits(importable: str, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed here: pip install 'ray[tune]'")
    pytest.importorskip("fsspec", reason="fsspec is not installed here")
    from hydra_train import ray as hydra_ray
    from on_ray import three_nodes

    class Scaled(nn.Module):
        """A class that no worker can import."""

        def forward(self, x: Any) -> Any:
            return functional.dropout(2 * x, 0.25, self.training)

    data, storage = {"train": rows(), "validation": rows(8, seed=2)}, tmp_path / "grid"
    settings = ADAMW | {"lr": [1e-2, 3e-3, 1e-3, 3e-4], "eval_every": 2}
    accuracy = {"accuracy": lambda outputs, batch: (outputs.argmax(-1) == batch["y"].reshape(-1)).sum()}
    made = perceptron(Scaled, metrics=accuracy)
    expected = hydra.select(model=made, data=data, **settings).wait()
    with three_nodes():
        report = hydra_ray.select(storage_path=storage, model=made, data=data, **settings)
        runs = sorted((storage / "runs").iterdir())
        again = hydra_ray.select(storage_path=storage, model=made, data=data, **settings)
        with pytest.raises(hydra.UsageError, match="has another grid"):
            hydra_ray.select(storage_path=storage, model=made, data=rows(seed=3), **settings)
    kinds = ("name", "rank", "losses", "evaluations", "validation", "weights_sha256")
    alone = hydra.report(expected.directory)
    assert report["state"] == "done"
    assert [[task[kind] for kind in kinds] for task in report["tasks"]] == [[task[kind] for kind in kinds] for task in alone["tasks"]]
    assert again["tasks"] == report["tasks"] and sorted((storage / "runs").iterdir()) == runs, "nothing is trained twice"
    assert_same_bits(made.load(report["tasks"][0]["model_dir"]), expected.best.load())


def test_a_chain_that_cannot_be_copied_to_nodes_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed here: pip install 'ray[tune]'")
    pytest.importorskip("fsspec", reason="fsspec is not installed here")
    from hydra_train import ray as hydra_ray
    from hydra_train._cluster.node import Node

    class Rows(list[Any]):
        pass

    locked = Rows(rows())
    locked.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(hydra.UsageError, match="cannot be copied to the nodes: cannot pickle '_thread.lock'") as caught:
        hydra_ray.select(storage_path=tmp_path / "grid", model=perceptron(), data=locked, lr=[1e-3])
    assert caught.value.keyword == "model"
    # A node finds a chain that is not the driver's, as with another version of PyTorch.
    node = Node(str(tmp_path / "grid"), ["--model=torch:chain-0", "--data=torch:data-0"], None, hydra_ray._to_bytes((perceptron(), rows())))
    with pytest.raises(hydra.HydraError, match="are not those of the driver: it has torch:chain-"):
        node._make_own()
    node.close()


def test_ray_tune_trains_a_chain_to_the_same_bits(importable: str, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed here: pip install 'ray[tune]'")
    tune = pytest.importorskip("ray.tune", reason="Ray Tune is not installed here: pip install 'ray[tune]'")
    from hydra_train import ray as hydra_ray

    data = {"train": rows(), "validation": rows(8, seed=2)}
    settings = {key: value for key, value in ADAMW.items() if key != "lr"} | {"eval_every": 2}
    ray.init(num_cpus=1, log_to_driver=False, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": importable}})
    try:
        tuner = tune.Tuner(
            tune.with_parameters(hydra_ray.HydraTrainable, model=perceptron(), data=data),
            param_space={**settings, "lr": tune.grid_search([1e-2, 1e-3])},
            tune_config=tune.TuneConfig(metric="loss", mode="min"),
            run_config=tune.RunConfig(storage_path=str(tmp_path / "tune"), verbose=0),
        )
        results = tuner.fit()
    finally:
        ray.shutdown()
    assert not results.errors
    expected = hydra.select(model=perceptron(), data=data, lr=[1e-2, 1e-3], **settings).wait()
    assert sorted(result.metrics["weights_sha256"] for result in results) == sorted(hashes(expected).values())
    assert all(result.metrics["training_iteration"] == 3 for result in results)


# What data draws, and what `collate` returns.


class Augmented:
    """Rows with noise that PyTorch draws for each read."""

    def __init__(self, items: int) -> None:
        self.rows = rows(items)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = self.rows[index]
        return row | {"x": row["x"] + 0.5 * torch.randn(row["x"].shape)}


def mixed(items: list[Any]) -> Any:
    batch = torch.utils.data.default_collate(items)
    if len(items) > 1:
        part = torch.distributions.Beta(torch.tensor(0.4), torch.tensor(0.4)).sample()
        batch["x"] = part * batch["x"] + (1 - part) * batch["x"][torch.randperm(len(items))]
    return batch


def test_what_pytorch_draws_for_data_depends_on_the_items() -> None:
    data = {"train": Augmented(24), "validation": Augmented(8)}
    settings = ADAMW | {"no_shuffle": None, "steps": 14}
    model = perceptron(collate=mixed)
    state = torch.get_rng_state()
    alone = hydra.select(model=model, data=data, **settings).wait()
    assert torch.equal(state, torch.get_rng_state()), "the global generator is not used"
    torch.rand(3)
    grid = hydra.select(model=model, data=data, **(settings | {"lr": [1e-2, 1e-3], "devices": "cpu:2x1", "cuts": [1, 3]}))
    while grid.state == "running":
        torch.rand(100)
    found, expected = grid.wait().tasks["lr1e-3"], next(iter(alone.tasks.values()))
    assert (found.losses, found.weights_sha256, found.validation) == (expected.losses, expected.weights_sha256, expected.validation)
    # The batches of an epoch are others than those of the last one, and so is what they draw.
    read = model.bind(data)
    assert read.train is not None and read.validation is not None
    batches = [of._collated(items)["x"] for of, items in [(read.train, [0, 1]), (read.train, [0, 2]), (read.validation, [0, 1])]]
    assert len({each[0].sum().item() for each in batches}) == 3
    whole = hydra.select(model=perceptron(collate=mixed), data=data, **(settings | {"steps": 300})).wait()
    run = hydra.select(model=perceptron(collate=mixed), data=data, checkpoint_every="10", **(settings | {"steps": 300}))
    next(event for event in run if event["event"] == "minibatch")
    run.stop()
    assert next(iter(run.wait().tasks.values())).steps < 300
    assert hashes(hydra.resume(run.directory, model=perceptron(collate=mixed), data=data).wait()) == hashes(whole)


def test_masked_tokens_of_a_collator_have_the_same_bits_when_cut() -> None:
    transformers = pytest.importorskip("transformers", reason="Transformers is not installed here")
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed here")
    special = ["[PAD]", "[MASK]", "[UNK]"]
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: at for at, word in enumerate(special + [str(at) for at in range(253)])}, "[UNK]"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", mask_token="[MASK]", unk_token="[UNK]")
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3)
    torch.manual_seed(7)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**SMALL))
    data = [{"input_ids": row["input_ids"], "attention_mask": row["attention_mask"]} for row in tokens()]

    def counted(batch: Any) -> int:
        return int((batch["labels"] != -100).sum())

    def collate(items: list[Any]) -> Any:
        return dict(collator([{key: value.tolist() for key, value in item.items()} for item in items]))

    settings = ADAMW | {"no_shuffle": None, "force": None}
    whole, cut = (
        trained(chain(model, collate=collate, loss_targets=counted), data, **(settings | more))
        for more in ({}, {"cuts": [1, 2], "devices": "cpu:2x1"})
    )
    assert (whole.losses, whole.weights_sha256) == (cut.losses, cut.weights_sha256)


class Reads:
    """A dataset whose items a function makes."""

    def __init__(self, item: Callable[[int], Any]) -> None:
        self.item = item

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.item(index)


def test_data_that_cannot_be_repeated_is_refused_with_a_way_out() -> None:
    row = rows(1)[0]
    kept: dict[int, Any] = {}
    own = torch.Generator()

    def of(x: Any) -> Any:
        return row | {"x": x}

    def seeded(index: int) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(index)
            return of(torch.randn(row["x"].shape))

    def sometimes(items: list[Any]) -> Any:
        batch = torch.utils.data.default_collate(items)
        return batch | {"x": batch["x"].flip(0)} if len(items) > 1 and random.random() < 0.5 else batch

    for item, expected in [
        (lambda index: of(row["x"] * random.random()), "differs each time it is read: draw with PyTorch's functions"),
        (lambda index: of(row["x"] * float(numpy.random.rand())), "differs each time it is read: draw with PyTorch's functions"),
        (lambda index: of(torch.rand(row["x"].shape, generator=own)), "differs each time it is read: draw with PyTorch's functions"),
        (lambda index: kept.get(index) or kept.setdefault(index, of(torch.rand(row["x"].shape))), "draws random numbers the first time that it is read"),
        (seeded, "seeds PyTorch's global generator"),
    ]:
        with pytest.raises(hydra.UsageError, match=expected) as caught:
            hydra.select(model=perceptron(), data=Reads(item))
        assert caught.value.keyword == "data"
    random.seed(3)
    with pytest.raises(hydra.UsageError, match=r"items \d+ to \d+ of the train data differs each time that `collate` makes it: draw with"):
        hydra.select(model=perceptron(collate=sometimes), data=[of(torch.randn(row["x"].shape)) for _ in range(24)])
    of_index = Reads(lambda index: of(torch.rand(row["x"].shape, generator=torch.Generator().manual_seed(index))))
    expected_rows = [of(torch.rand(row["x"].shape, generator=torch.Generator().manual_seed(index))) for index in range(8)]
    assert trained(perceptron(), of_index).weights_sha256 == trained(perceptron(), expected_rows).weights_sha256


def test_a_collate_that_drops_items_is_refused_in_words_of_python() -> None:
    def dropping(items: list[Any]) -> Any:
        return torch.utils.data.default_collate(items[:3])

    with pytest.raises(hydra.HydraError, match="`collate` made 3 rows of `x` from 4 items of the train data") as caught:
        trained(perceptron(collate=dropping))
    assert "keep every item" in str(caught.value) and "Batch::" not in str(caught.value)
    one = perceptron(collate=lambda items: {key: each[:1] for key, each in torch.utils.data.default_collate(items).items()})
    assert trained(one).state == "done", "one row may stand for all items"


def test_a_batch_without_targets_is_refused_in_words_of_python() -> None:
    with pytest.raises(hydra.HydraError, match="has no targets for the loss to average over") as caught:
        trained(perceptron(loss_targets=lambda batch: 0))
    assert "`loss_targets` of a chain" in str(caught.value) and "Batch::terms" not in str(caught.value)


def test_a_module_that_differs_when_run_again_is_refused_in_words_of_python() -> None:
    # The global generators of Python and NumPy are refused by name, and this is none of them.
    generator = random.Random(1)

    class Restless(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * generator.random()

    with pytest.raises(hydra.HydraError, match="gives another output when it is run again") as caught:
        trained(perceptron(Restless))
    assert "PyTorch's functions in Python" in str(caught.value)


@pytest.mark.parametrize("found", [2.5, float("nan"), -1, None, "4", torch.ones(2)])
def test_loss_targets_that_are_no_whole_number_are_refused(found: Any) -> None:
    with pytest.raises(hydra.HydraError, match=re.escape(f"`loss_targets` returned {found!r}, expected")):
        trained(perceptron(loss_targets=lambda batch: found))


def test_a_task_of_modules_refuses_to_generate_and_names_the_loaded_model() -> None:
    task = trained(chain(model_of("Phi")), tokens(), steps=2)
    with pytest.raises(hydra.HydraError, match=re.escape("`task.load().generate(input_ids)`")):
        task.generate("Once")
    ids = tokens(1)[0]["input_ids"][None, :4]
    assert task.load().generate(ids, max_new_tokens=2, do_sample=False).shape[1] > 4
