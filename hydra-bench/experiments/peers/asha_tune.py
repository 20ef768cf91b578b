"""Runs Ray Tune's ASHA on recorded losses several times, and records the winner and the promoted trials of each run.

    python asha_tune.py LOSSES OUT [RUNS]

LOSSES is the file that `../asha` makes of a grid that Hydra has trained: the validation loss of each trial after every part. A trial
replays its losses, with random variation of the time of each part. OUT has one line of JSON per run.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler

#: The mean seconds of a part, and its relative variations.
PART_S = 0.02
SPREADS = (0.05, 0.5)
CONCURRENT = 8


class Replayed(tune.Trainable):
    """A trial that replays its losses from the file."""

    def setup(self, config):
        self.losses = json.loads(Path(config["losses"]).read_text())["trials"][config["trial"]]["losses"]
        self.spread, self.part = config["spread"], 0

    def reset_config(self, config):
        self.setup(config)
        return True

    def step(self):
        # Unseeded: the timing of a machine is not reproducible either.
        time.sleep(PART_S * random.SystemRandom().uniform(1 - self.spread, 1 + self.spread))
        self.part += 1
        return {"loss": self.losses[self.part - 1]}

    def save_checkpoint(self, checkpoint_dir):
        pass


def search(losses: Path, spread: float) -> dict:
    grid = json.loads(losses.read_text())
    parts = len(grid["trials"][0]["losses"])
    with tempfile.TemporaryDirectory() as folder:
        results = tune.Tuner(
            tune.with_resources(Replayed, {"cpu": 1}),
            param_space={"trial": tune.grid_search(list(range(len(grid["trials"])))), "losses": str(losses), "spread": spread},
            tune_config=tune.TuneConfig(
                metric="loss",
                mode="min",
                max_concurrent_trials=CONCURRENT,
                reuse_actors=True,
                scheduler=ASHAScheduler(max_t=parts, grace_period=1, reduction_factor=3),
            ),
            run_config=tune.RunConfig(storage_path=folder, verbose=0),
        ).fit()
    if results.errors:
        raise SystemExit(f"trials failed: {results.errors}")
    reached = {result.config["trial"]: result.metrics["training_iteration"] for result in results}
    best = results.get_best_result()
    rungs = [3**k for k in range(10) if 3**k < parts]
    return {
        "spread": spread,
        "winner": best.config["trial"],
        "loss": best.metrics["loss"],
        "parts": sum(reached.values()),
        # The trials that were trained further than each rung.
        "promoted": {rung: sorted(trial for trial, part in reached.items() if part > rung) for rung in rungs},
    }


def main() -> None:
    losses, out, runs = Path(sys.argv[1]).resolve(), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 10
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
    # Trials only sleep, so there may be more of them than processors.
    ray.init(address="local", num_cpus=CONCURRENT, log_to_driver=False, include_dashboard=False)
    with out.open("w") as file:
        for spread in SPREADS:
            for _ in range(runs):
                file.write(json.dumps(search(losses, spread)) + "\n")
                file.flush()


if __name__ == "__main__":
    main()
