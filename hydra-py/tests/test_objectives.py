"""Classifiers, preferences and reward models from Python: grids, forks, explanations, the dashboard, searches and Ray."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hydra_train as hydra
from conftest import ROOT, pairs, until_end

MOODS = {
    "good": ("love", "great", "happy", "superb"),
    "bad": ("hate", "awful", "sad", "broken"),
    "none": ("train", "table", "monday", "paper"),
}
DEVICES: dict[str, Any] = {"devices": "cpu:1x1", "device_memory": "64MiB"}
METRICS = {
    "classify": {"accuracy", "f1_macro", "f1_micro", "matthews_correlation"},
    "preference": {"reward_accuracy", "reward_margin", "chosen_reward", "rejected_reward"},
    "reward": {"reward_accuracy", "reward_margin", "chosen_reward", "rejected_reward"},
}
#: A language model of some thousand parameters with a tokenizer, over the words of the pairs below.
LLAMA = ROOT / "hydra-bench/tests/fixtures/preferences/llama"


def labelled(count: int, first: int = 0) -> list[dict[str, str]]:
    """Returns texts of three classes; every fifth one has another class than its words."""
    rows = []
    for at in range(first, first + count):
        classes = list(MOODS)
        mood = classes[at * 7 % 3]
        words = [MOODS[mood][(at // 3 + place * at) % 4] for place in range(2)]
        label = classes[(at * 7 + 1) % 3] if at % 5 == 4 else mood
        rows.append({"text": f"{words[0]} the {words[1]} {at}", "label": label})
    return rows


def written(folder: Path, rows: list[dict[str, str]], held_out: list[dict[str, str]]) -> Path:
    """Writes rows as a folder of data, with a file for each split."""
    folder.mkdir()
    for split, found in {"train": rows, "validation": held_out, "test": held_out[:4]}.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    return folder


@pytest.fixture(params=["classify", "preference", "reward"])
def objective(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    return settings_of(request.param, tmp_path)


def settings_of(task: str, folder: Path) -> dict[str, Any]:
    """Returns the settings of a task that is cut into three shards, with its data."""
    common = {"task": task, "batch": 4, "accumulate": 2, "cuts": [1, 2], **DEVICES}
    if task == "classify":
        data = written(folder / "texts", labelled(32), labelled(12, 40))
        return {**common, "model": "bytes-bert-tiny", "metric": "f1_macro", "data": data}
    data = written(folder / "pairs", pairs(20), pairs(8, 20))
    return {**common, "model": LLAMA, "lora": 4, "metric": "reward_margin", "data": data}


def flags(settings: dict[str, Any]) -> list[str]:
    """Returns settings as the command line takes them."""
    text = {name: ",".join(map(str, value)) if isinstance(value, list) else str(value) for name, value in settings.items()}
    return [f"--{name.replace('_', '-')}={value}" for name, value in text.items()]


def hashes(report: dict[str, Any]) -> dict[str, str]:
    return {task["name"]: task["weights_sha256"] for task in report["tasks"] if task["state"] == "done"}


def test_the_bits_are_those_of_the_command_line(objective: dict[str, Any], tmp_path: Path, hydra_program: Path) -> None:
    settings = {**objective, "lr": [1e-3, 3e-3], "steps": 3, "eval_every": 2}
    command = [hydra_program, "select", *flags(settings), "--json", "--out", str(tmp_path / "cli")]
    there = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    run = hydra.select(**settings, out=tmp_path / "python").wait()
    assert len(hashes(there)) == 2 and hashes(run.report) == hashes(there)
    for name, task in run.tasks.items():
        same = next(each for each in there["tasks"] if each["name"] == name)
        assert (task.losses, task.validation, task.test) == (same["losses"], same["validation"], same["test"])
    assert [task["name"] for task in hydra.report(tmp_path / "cli")["tasks"]] == list(run.tasks)
    rows, metric = run.leaderboard, f"validation_{objective['metric']}"
    assert [row["rank"] for row in rows] == [1, 2] and rows[0][metric] > rows[1][metric]


def test_a_fork_has_the_results_of_its_own_settings(objective: dict[str, Any]) -> None:
    run = hydra.select(**objective, lr=1e-3, steps=1_000_000, reserve_for_forks=True)
    next(event for event in run if event["event"] == "minibatch")
    (task,) = run.tasks.values()
    place = task.pause()
    same = task.fork(name="same", steps=place + 4)
    faster = task.fork(name="faster", steps=place + 4, lr=1e-2)
    fresh = task.fork(name="fresh", steps=4, lr=1e-2, weights_only=True)
    with pytest.raises(hydra.HydraError, match="`beta` is not a setting of a task"):
        task.fork(beta=0.5)
    until_end(run, "same", "faster", "fresh")
    run.stop()
    run.wait()
    # A fork that changes only the length has the bits and the metrics of a run of that length.
    alone = hydra.select(**objective, lr=1e-3, steps=place + 4, out="alone").wait().best
    assert same.weights_sha256 == alone.weights_sha256 and same.losses == alone.losses
    assert (same.validation, same.test) == (alone.validation, alone.test)
    # Another rate counts from the first step of the fork: its first loss is still that of the parent's weights.
    rates = [event["rate"] for event in run if event["event"] == "minibatch" and event["task"] == "faster"]
    assert rates == [1e-2] * 4
    assert faster.losses[: place + 1] == alone.losses[: place + 1] and faster.losses[place + 1] != alone.losses[place + 1]
    assert faster.validation != same.validation
    # A fork of the weights alone is a run from the files that the parent has written; a preference run has another reference there.
    written = {"adapter": task.model_dir} if "lora" in objective else {"model": task.model_dir}
    others = {name: value for name, value in objective.items() if name != "lora"}
    again = hydra.select(**{**others, **written}, lr=1e-2, steps=4, out="again").wait().best
    if objective["task"] != "preference":
        assert fresh.weights_sha256 == again.weights_sha256 and fresh.validation == again.validation
    # The metrics of each fork are those of its files.
    for fork in (same, faster, fresh):
        files = {"adapter": fork.model_dir, "model": objective["model"]} if "lora" in objective else {"model": fork.model_dir}
        evaluated = hydra.evaluate(task=objective["task"], data=objective["data"], split="validation", batch=4, **files, **DEVICES)
        assert fork.validation is not None
        assert evaluated["metrics"] == pytest.approx(fork.validation["metrics"], abs=1e-6)
        assert evaluated["loss"] == pytest.approx(fork.validation["loss"], abs=1e-6)


def elements(file: Path) -> int:
    """Returns the number of values in a file of safetensors."""
    with file.open("rb") as opened:
        header = json.loads(opened.read(struct.unpack("<Q", opened.read(8))[0]))
    return sum(math.prod(each["shape"]) for name, each in header.items() if name != "__metadata__")


def test_an_explanation_predicts_and_trains_nothing(objective: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    settings = {**objective, "lr": [1e-3, 3e-3], "steps": 3}
    explained = hydra.explain(**settings)
    dry = hydra.select(**settings, dry_run=True).wait().report
    assert not Path("runs").exists() and "scoring" not in capfd.readouterr().err
    run = hydra.select(**settings).wait()
    # A preference run scores its reference before it trains; an explanation does not.
    assert ("scoring" in capfd.readouterr().err) == (objective["task"] == "preference")
    trained = {task.name: task for task in run.tasks.values()}
    for report in (explained, dry):
        assert {task["name"] for task in report["tasks"]} == set(trained)
        for task in report["tasks"]:
            same = trained[task["name"]]
            assert task["parameters"] == same.report["parameters"] and task["shards"] == same.report["shards"] == 3
            assert same.model_dir is not None
            (file,) = same.model_dir.glob("*model.safetensors")
            assert task["trained_parameters"] == elements(file)
            assert task["steps"] == same.steps == 3
        # Memory: the run stays within what is predicted, and uses more than the half of it.
        assert report["host_admitted_bytes"] / 2 < run.report["host_peak_bytes"] <= report["host_admitted_bytes"]
        (device,), (predicted,) = run.report["devices"], report["prediction"]["devices"]
        assert predicted["peak_bytes"] / 2 < device["peak_bytes"] <= predicted["peak_bytes"]
        # Files and traffic are exact: the weights are written in 32 bits, and the cache holds all parameters.
        assert report["files"]["model_bytes"] == 4 * sum(task["trained_parameters"] for task in report["tasks"])
        assert report["prediction"]["promoted_bytes"] == run.report["transfers"]["parameter_bytes"]
        # Times.
        minibatches = [task["minibatch_s"] for task in report["prediction"]["tasks"]]
        assert len(minibatches) == 2 and min(minibatches) > 0
        assert report["prediction"]["makespan_s"] > max(minibatches) * 3
    assert explained["times"]["running_s"] == explained["prediction"]["makespan_s"]


@pytest.fixture
def served(tmp_path: Path, hydra_program: Path) -> Iterator[str]:
    """The address of ``hydra serve`` of the test's folder."""
    server = subprocess.Popen([hydra_program, "serve", str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield server.stdout.readline().partition("/#token=")[0]
    finally:
        server.kill()
        server.communicate()


def test_the_dashboard_has_the_metrics(objective: dict[str, Any], tmp_path: Path, served: str) -> None:
    run = hydra.select(**objective, lr=[1e-3, 1e-2], steps=4, eval_every=2, out=tmp_path / "run").wait()
    address = f"{served}/api/runs/{urllib.parse.quote(str(run.directory), safe='')}"
    with urllib.request.urlopen(address) as answer:
        shown = {task["name"]: task for task in json.load(answer)["tasks"]}
    assert list(shown) == list(run.tasks)
    for name, task in run.tasks.items():
        assert shown[name]["rank"] == task.rank
        assert shown[name]["initial_validation"] == task.initial_validation and shown[name]["test"] == task.test
        evaluations = shown[name]["evaluations"]
        assert evaluations == task.report["evaluations"] and [step for step, _ in evaluations] == [2, 4]
        # The better of both decides which weights are kept.
        best = max((result for _, result in evaluations), key=lambda result: result["metrics"][objective["metric"]])
        assert task.validation == best
        assert best["selected_by"] == {"name": objective["metric"], "higher_is_better": True}
        assert set(best["metrics"]) == METRICS[objective["task"]]
    with urllib.request.urlopen(f"{address}/events?from=0") as stream:
        first = next(line for line in stream if line.startswith(b"data: "))
    lines = json.loads(first.removeprefix(b"data: "))["lines"]
    assert [line for line in lines if line["event"] == "evaluation"] == [event for event in run if event["event"] == "evaluation"]


def test_a_search_goes_by_the_metric(objective: dict[str, Any]) -> None:
    # Of these rates, the metric chooses another one than the loss. A lower reward of rejected answers is better.
    metric, sign = ("f1_macro", 1) if objective["task"] == "classify" else ("rejected_reward", -1)
    settings = {**objective, "metric": metric}
    run = hydra.select(**settings, search="halving", trials=3, steps=6, eta=3, sample={"lr": "log:1e-3..3e-2"}).wait()
    tasks = list(run.tasks.values())
    best, others = tasks[0], tasks[1:]
    assert (best.state, best.steps) == ("done", 6) and [(task.state, task.steps) for task in others] == [("stopped", 2)] * 2

    def first(task: hydra.Task) -> tuple[float, float]:
        step, result = task.report["evaluations"][0]
        assert step == 2
        assert result["selected_by"] == {"name": metric, "higher_is_better": sign > 0}
        return sign * result["metrics"][metric], result["loss"]

    assert all(first(task)[0] < first(best)[0] for task in others)
    assert any(first(task)[1] < first(best)[1] for task in others), "the loss chooses another one"
    # A trial has the metric and the bits of a run of its own.
    alone = hydra.select(**settings, lr=best.config["lr"], steps=6, eval_at=[2, 6], out="alone").wait().best
    assert alone.weights_sha256 == best.weights_sha256 and alone.report["evaluations"] == best.report["evaluations"]


# Ray.


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster of three nodes, which the tests share."""
    pytest.importorskip("ray", reason="Ray is not installed here: pip install 'ray[tune]'")
    pytest.importorskip("fsspec", reason="fsspec is not installed here")
    from on_ray import three_nodes

    with three_nodes():
        yield


@pytest.mark.parametrize("objective", ["classify", "preference"], indirect=True)
def test_three_nodes_train_the_bits_of_the_command_line(
    cluster: None, objective: dict[str, Any], tmp_path: Path, hydra_program: Path
) -> None:
    from hydra_train import ray as hydra_ray

    settings = {**objective, "lr": [1e-3, 3e-3, 1e-2], "steps": 4, "eval_every": 2}
    report = hydra_ray.select(storage_path=tmp_path / "ray", **settings)
    command = [hydra_program, "select", *flags(settings), "--json", "--out", str(tmp_path / "cli")]
    there = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert report["state"] == "done" and report["notes"] == []
    assert len(hashes(there)) == 3 and hashes(report) == hashes(there)
    alone = hydra.report(tmp_path / "cli")["tasks"]
    kinds = ("name", "rank", "initial_validation", "evaluations", "validation", "test")
    assert [[task[kind] for kind in kinds] for task in report["tasks"]] == [[task[kind] for kind in kinds] for task in alone]
    metric = [task["validation"]["metrics"][objective["metric"]] for task in report["tasks"]]
    assert metric == sorted(metric, reverse=True)


@pytest.mark.parametrize("objective", ["classify", "preference"], indirect=True)
def test_tune_gets_the_metrics_of_a_trial(cluster: None, objective: dict[str, Any], tmp_path: Path) -> None:
    tune = pytest.importorskip("ray.tune", reason="Ray Tune is not installed here: pip install 'ray[tune]'")
    from hydra_train import ray as hydra_ray

    metric = objective["metric"]
    trial = {**objective, "data": str(objective["data"]), "model": str(objective["model"]), "steps": 4, "eval_every": 2}
    tuner = tune.Tuner(
        hydra_ray.HydraTrainable,
        param_space={**trial, "lr": tune.grid_search([1e-3, 1e-2])},
        tune_config=tune.TuneConfig(metric=metric, mode="max"),
        run_config=tune.RunConfig(storage_path=str(tmp_path / "tune"), verbose=0),
    )
    results = tuner.fit()
    assert len(results) == 2 and not results.errors
    found = {result.config["lr"]: result.metrics for result in results}
    run = hydra.select(**objective, lr=[1e-3, 1e-2], steps=4, eval_every=2, out="alone").wait()
    for task in run.tasks.values():
        reported, (_, last) = found[task.config["lr"]], task.report["evaluations"][-1]
        assert {name: reported[name] for name in METRICS[objective["task"]]} == last["metrics"]
        assert reported["weights_sha256"] == task.weights_sha256
    best = max(run.tasks.values(), key=lambda task: task.report["evaluations"][-1][1]["metrics"][metric])
    assert results.get_best_result().config["lr"] == best.config["lr"]
