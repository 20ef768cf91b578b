"""Measures the overhead of the Python package and of the cluster driver: tokens per second and memory of one grid from the command line,
from Python, and with `hydra_train.ray.select` on one node, alternating.

    python overhead.py OUT [REPEATS] [--without-python] [--without-ray]

Run it with a Python that has the `hydra_train` of this tree (and Ray), after `cargo build -p hydra-bench`. OUT is a file of JSON lines, one
per run. Tokens per second are those of the run's report, without the start of a program or a cluster, which `wall_s` includes.
`.._beside` are processor seconds per second of training, the more reliable figure on a busy machine: in Python those of the thread that
receives the events, with Ray those of the driver's process.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
HYDRA = Path(os.environ.get("HYDRA_PROGRAM", HERE / "target/debug/hydra"))

SETTINGS = {
    "model": "bytes-small", "batch": 8, "context": 128, "lr": [1e-3, 5e-4, 2e-4, 1e-4], "steps": int(os.environ.get("STEPS", "25")), "eval_limit": 4,
    "devices": os.environ.get("DEVICES", "cpu:2x1"), "device_memory": "128MiB", "checkpoint_every": 5,
}

PYTHON = """
import json, sys, time
import hydra_train as hydra
begun = time.thread_time()
run = hydra.select(**json.loads(sys.argv[1]), out=sys.argv[2])
for event in run:
    pass
print(json.dumps(run.report | {"events_beside": (time.thread_time() - begun) / run.report["makespan_s"]}))
"""

#: Finds the peak memory of the node's process by its name.
RAY = """
import json, logging, sys, threading, time
from pathlib import Path
import ray
from hydra_train import ray as hydra_ray
ray.init(address="local", num_cpus=1, log_to_driver=False, include_dashboard=False)
peak, seen, ended = [0], [], threading.Event()
def watch():
    while not ended.wait(1):
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if b"ray::Node" in (process / "cmdline").read_bytes():
                    lines = (process / "status").read_text().splitlines()
                    peak[0] = max([peak[0], *(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))])
            except OSError:
                pass
        trains = any(Path(sys.argv[2], "runs").glob("*/metrics.jsonl"))
        if trains:
            seen.append((time.monotonic(), time.process_time() - time.thread_time()))
threading.Thread(target=watch, daemon=True).start()
hydra_ray.select(storage_path=sys.argv[2], **json.loads(sys.argv[1]))
ended.set()
(run,) = Path(sys.argv[2], "runs").iterdir()
# From the first sample to the last: the cost of a driver that waits.
(first, *_, last) = seen
more = {"node_peak_kib": peak[0], "driver_beside": (last[1] - first[1]) / (last[0] - first[0])}
print(json.dumps(json.loads((run / "report.json").read_text()) | more))
"""


def flags() -> list[str]:
    def text(value: object) -> str:
        return ",".join(map(str, value)) if isinstance(value, list) else str(value)

    return [f"--{name.replace('_', '-')}={text(value)}" for name, value in SETTINGS.items()]


def command(variant: str, out: Path) -> list[str]:
    if variant == "command line":
        return [str(HYDRA), "select", "--json", "--progress", "none", *flags(), "--out", str(out)]
    return [sys.executable, "-c", RAY if variant == "ray" else PYTHON, json.dumps(SETTINGS | {"progress": "none"} if variant == "python" else SETTINGS), str(out)]


def measured(variant: str) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        environment = os.environ | {"HYDRA_RESERVATIONS": ""}
        with open(Path(folder) / "log", "w") as log:
            child = subprocess.Popen(command(variant, Path(folder) / "run"), stdout=subprocess.PIPE, stderr=log, env=environment)
            assert child.stdout is not None
            printed = child.stdout.read()
            _, status, used = os.wait4(child.pid, 0)
        if status != 0:
            raise SystemExit(f"{variant}: {(Path(folder) / 'log').read_text()}")
    report = json.loads(printed)
    return {
        "variant": variant,
        "tokens_per_s": report["tokens_per_s"],
        "makespan_s": report["makespan_s"],
        "utilization": [device["utilization"] for device in report["devices"]],
        "peak_mib": report.get("node_peak_kib", used.ru_maxrss) / 1024,
        **{name: value for name, value in report.items() if name.endswith("_beside")},
        "wall_s": time.monotonic() - begun,
        "load": os.getloadavg()[0],
        "weights_sha256": sorted(task["weights_sha256"] for task in report["tasks"]),
    }


def main() -> None:
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    out, repeats = Path(arguments[0]), int(arguments[1]) if len(arguments) > 1 else 5
    skipped = [argument.removeprefix("--without-") for argument in sys.argv if argument.startswith("--without-")]
    variants = [variant for variant in ("command line", "python", "ray") if variant not in skipped]
    rows = []
    with out.open("w") as file:
        for repeat in range(repeats):
            # The order rotates, so that drift of the machine's speed favours no variant.
            for variant in variants[repeat % len(variants) :] + variants[: repeat % len(variants)]:
                rows.append(measured(variant))
                file.write(json.dumps(rows[-1]) + "\n")
                file.flush()
    assert len({tuple(row["weights_sha256"]) for row in rows}) == 1, "the weights differ"
    of = {variant: [row for row in rows if row["variant"] == variant] for variant in variants}
    for variant in variants:
        speeds = [row["tokens_per_s"] for row in of[variant]]
        # Ratios of adjacent runs, so that other load affects both.
        ratios = [mine / base["tokens_per_s"] for mine, base in zip(speeds, of["command line"])]
        print(
            f"{variant}: {statistics.median(speeds):.0f} tokens/s ({min(speeds):.0f} to {max(speeds):.0f}), "
            f"ratio to the command line {statistics.median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f}), "
            f"peak {statistics.median(row['peak_mib'] for row in of[variant]):.0f} MiB"
        )


if __name__ == "__main__":
    main()
