"""Compares the makespan of a grid on three unequal nodes with a lower bound for every placement, measured in the same run.

    python cluster.py OUT [REPEATS]

Run it with a Python that has Ray and the `hydra_train` of this tree. The nodes are processes on this machine with one device each. As root,
control groups limit them to 0.8, 0.5 and 0.3 of a processor; otherwise they are equal. OUT has one line of JSON per run.

The bound: the work of each configuration (its busy seconds on the device) and the speed of each node are fitted to the measured runs. No
placement ends before the total work divided by the total speed, nor before the longest task on the fastest node.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from hydra_train import ray as hydra_ray

SHARES = (0.8, 0.5, 0.3)
GROUPS = Path("/sys/fs/cgroup/cpu/hydra-cluster")
PERIOD_US = 20_000

SETTINGS = {
    "model": "bytes-small", "batch": [4, 8, 16], "context": 128, "lr": [1e-3, 5e-4, 2e-4, 1e-4], "steps": 50, "eval_limit": 4,
    "no_initial_validation": True, "devices": "cpu:1x1", "device_memory": "192MiB", "checkpoint_every": 5,
}


class Times(logging.Handler):
    """Records the time of each log message of the driver."""

    def __init__(self) -> None:
        super().__init__()
        self.of: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.of.append((time.monotonic(), record.getMessage()))


def group(name: str, share: float) -> Path | None:
    """Makes a control group with a share of a processor, weighted above other processes. Returns None if that is not possible."""
    try:
        GROUPS.mkdir(exist_ok=True)
        (GROUPS / "cpu.shares").write_text(str(200_000))
        made = GROUPS / name
        made.mkdir(exist_ok=True)
        (made / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (made / "cpu.cfs_quota_us").write_text(str(int(share * PERIOD_US)))
        return made
    except OSError:
        return None


def below(process: int) -> list[int]:
    """Returns a process and its descendants."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [process, *(each for child in children for each in below(int(child)))]


def unequal(cluster: Cluster) -> dict[str, float]:
    """Adds the nodes and returns the processor share of each, by its name."""
    shares = {}
    for number, share in enumerate(SHARES):
        node = cluster.add_node(num_cpus=1)
        made = group(f"node{number}", share)
        raylet = node.all_processes["raylet"][0].process.pid
        for process in below(raylet) if made else []:
            try:
                (made / "cgroup.procs").write_text(str(process))
            except OSError:
                # The process has ended.
                pass
        shares[node.node_id] = share if made else 1.0
    return shares


def rates(storage: Path) -> dict[tuple[int, str], float]:
    """Returns the busy seconds of a whole task by batch size and node, for the pairs that occurred."""
    parts: dict[tuple[int, str], float] = defaultdict(float)
    busy: dict[tuple[int, str], float] = defaultdict(float)
    for run in sorted((storage / "runs").iterdir()):
        report = json.loads((run / "report.json").read_text())
        for task in report["tasks"]:
            if task["config"] is None:
                continue
            key = (task["config"]["batch"], run.name.split("-")[1])
            parts[key] += (task["steps"] - (task["resumed_at"] or 0)) / SETTINGS["steps"]
            busy[key] += task["compute_s"]
    return {key: busy[key] / parts[key] for key in parts if parts[key] > 0}


def bound(rates: dict[tuple[int, str], float]) -> tuple[float, dict[str, float]]:
    """Returns the lower bound of the makespan, and the speeds of the nodes: the best fit of work over speed to the rates."""
    batches, nodes = {batch for batch, _ in rates}, {node for _, node in rates}
    work, speed = dict.fromkeys(batches, 0.0), dict.fromkeys(nodes, 0.0)
    for _ in range(100):
        for batch in batches:
            seen = [math.log(rate) + speed[n] for (b, n), rate in rates.items() if b == batch]
            work[batch] = sum(seen) / len(seen)
        for node in nodes:
            seen = [work[b] - math.log(rate) for (b, n), rate in rates.items() if n == node]
            speed[node] = sum(seen) / len(seen)
    works = {batch: math.exp(value) for batch, value in work.items()}
    speeds = {node: math.exp(value) for node, value in speed.items()}
    each = len(SETTINGS["lr"])
    return max(each * sum(works.values()) / sum(speeds.values()), max(works.values()) / max(speeds.values())), speeds


def measured(cluster: Cluster, shares: dict[str, float]) -> dict[str, object]:
    times = Times()
    log = logging.getLogger("hydra_train.ray")
    log.setLevel(logging.INFO)
    log.addHandler(times)
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        report = hydra_ray.select(storage_path=folder, least_gain_s=2.0, **SETTINGS)
        whole = time.monotonic() - begun
        found = rates(Path(folder))
    log.removeHandler(times)
    first = next(at for at, what in times.of if what.startswith("place: "))
    last = max(at for at, what in times.of if what.startswith("ended: "))
    least, speeds = bound(found)
    return {
        "makespan_s": last - first,
        "bound_s": least,
        "ratio": (last - first) / least,
        "whole_s": whole,
        "shares": {node[:8]: share for node, share in shares.items()},
        "speeds": speeds,
        "busy_s": {f"{batch} on {node}": rate for (batch, node), rate in sorted(found.items())},
        "moves": sum(what.startswith("move: ") for _, what in times.of),
        "happened": [(round(at - first, 2), what) for at, what in times.of],
        "load": os.getloadavg()[0],
        "hashes": {task["name"]: task["weights_sha256"] for task in report["tasks"]},
    }


def main() -> None:
    out, repeats = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3
    os.environ["HYDRA_RESERVATIONS"] = ""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        shares = unequal(cluster)
        ray.init(address=cluster.address, log_to_driver=False)
        with out.open("w") as file:
            for _ in range(repeats):
                row = measured(cluster, shares)
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(f"makespan {row['makespan_s']:.1f} s, bound {row['bound_s']:.1f} s, ratio {row['ratio']:.3f}, {row['moves']} moves, load {row['load']:.1f}")
    finally:
        ray.shutdown()
        cluster.shutdown()
        for made in [*GROUPS.glob("node*"), GROUPS]:
            for _ in range(50):
                try:
                    made.rmdir()
                    break
                except OSError:
                    time.sleep(0.1)


if __name__ == "__main__":
    main()
