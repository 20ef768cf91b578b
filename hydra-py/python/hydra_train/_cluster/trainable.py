"""A Ray Tune trainable. One actor per node trains the steps of all its trials, so that trials do not compete for the devices."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import hydra_train
from hydra_train._cluster.folder import Folder
from hydra_train._errors import UsageError

#: The files from which a trial's run can be resumed, and those of an ended trial.
KEPT = ("spec.toml", "checkpoints", "metrics.jsonl")
ENDED = ("models",)
#: The file with the number of evaluations of a trial.
STATE = "trial.json"


class Devices:
    """The actor with the devices of a node: it trains one step of one trial at a time."""

    def advance(self, directory: str, settings: Mapping[str, Any], evaluations: int, own: Mapping[str, Any]) -> dict[str, Any]:
        """Trains a trial until it has this number of evaluations, or to its end, and returns its task as in the report.

        ``own`` has the model and the data if they are modules of PyTorch and a dataset.
        """
        run = Path(directory)
        if not (run / "spec.toml").exists():
            trial = hydra_train.train(**settings, **own, out=run)
        else:
            task = _task(run)
            if len(task["evaluations"]) >= evaluations or task["state"] == "done":
                return task
            trial = hydra_train.resume(run, **own)
        at, steps = evaluations * int(settings["eval_every"]), None
        for event in trial:
            steps = event["steps"] if event["event"] == "task" else steps
            # At its end, a trial is validated and written.
            if event["event"] == "evaluation" and event["kind"] == "periodic" and event["step"] >= at and event["step"] != steps:
                trial.stop()
        trial.wait()
        return _task(run)


def _task(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = hydra_train.report(run)["tasks"][0]
    return found


class HydraTrainable(tune.Trainable):
    """A trial with one configuration: the keywords of :func:`hydra_train.train`; ``eval_every`` is required.

    Each iteration trains ``eval_every`` minibatches, and reports ``loss``, ``perplexity`` and a classifier's metrics, such as
    ``f1_macro``, on the validation data, ``minibatches`` and, at the end, ``weights_sha256``. A checkpoint at the end has the model in ``run/models``. Restored trials are bit-identical to
    uninterrupted trials.

    ``tune.with_parameters(HydraTrainable, model=chain, data=data)`` trains a ``hydra_train.torch.Chain`` on a dataset.
    """

    def setup(self, config: dict[str, Any], model: Any = None, data: Any = None) -> None:
        if not config.get("eval_every"):
            raise UsageError("a trial needs `eval_every`: it reports after every `eval_every` minibatches", keyword="eval_every")
        if hasattr(config.get("model"), "modules"):
            raise UsageError(
                "modules of PyTorch are no part of a trial's configuration: tune.with_parameters(HydraTrainable, model=chain, data=data)",
                keyword="model",
            )
        self._settings = {"progress": "none", **config}
        # They may be large, and each step needs them.
        self._own = ray.put({} if model is None else {"model": model, "data": data})
        self._folder = Folder("hydra-trial-")
        self._evaluations, self._ended = 0, False
        self._devices = _devices()

    @property
    def _run(self) -> Path:
        return self._folder.path / "run"

    def step(self) -> dict[str, Any]:
        self._evaluations += 1
        task = ray.get(self._devices.advance.remote(str(self._run), self._settings, self._evaluations, self._own))
        every = int(self._settings["eval_every"])
        found = {step: result for step, result in task["evaluations"]}.get(self._evaluations * every)
        last = task["state"] != "stopped" and (found is None or self._evaluations * every >= task["steps"])
        result = task["validation"] if found is None else found
        if task["state"] == "failed" or result is None:
            raise RuntimeError(f"the trial failed: {task['error']}")
        reported = {
            "loss": result["loss"],
            "perplexity": result.get("perplexity"),
            **(result.get("metrics") or {}),
            "minibatches": min(self._evaluations * every, task["steps"]),
            "done": last,
        }
        self._ended = last
        if last:
            reported["weights_sha256"] = task["weights_sha256"]
        return reported

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        target = Path(checkpoint_dir)
        for name in KEPT + (ENDED if self._ended else ()):
            source = self._run / name
            if source.is_dir():
                shutil.copytree(source, target / "run" / name)
            elif source.exists():
                (target / "run").mkdir(exist_ok=True)
                shutil.copy2(source, target / "run" / name)
        (target / STATE).write_text(json.dumps({"evaluations": self._evaluations}))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        source = Path(checkpoint_dir)
        shutil.rmtree(self._run, ignore_errors=True)
        if (source / "run").exists():
            shutil.copytree(source / "run", self._run)
        self._evaluations = json.loads((source / STATE).read_text())["evaluations"]

    def cleanup(self) -> None:
        self._folder.remove()


def _devices() -> Any:
    """Returns the actor of this node, and makes it if it does not exist. It handles one call at a time."""
    node = ray.get_runtime_context().get_node_id()
    resources: dict[str, float] = next((each["Resources"] for each in ray.nodes() if each["NodeID"] == node), {})
    options = {
        "name": f"hydra-devices-{node}",
        "namespace": "hydra",
        "get_if_exists": True,
        "lifetime": "detached",
        # Trials request processors themselves; the actor has all GPUs.
        "num_cpus": 0,
        "num_gpus": resources.get("GPU", 0),
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }
    return ray.remote(Devices).options(**options).remote()
