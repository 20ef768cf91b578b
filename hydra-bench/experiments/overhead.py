"""What the Python package and the driver of a cluster cost: tokens a second of one grid, and memory, from the command line, from Python and
through `hydra_train.ray.select` on one node, in turns.

    python overhead.py OUT [REPEATS] [--without-ray]

Run it with a Python that has `hydra_train` (and Ray) of this tree's build, after `cargo build -p hydra-bench`. OUT is a file of JSON
lines, one for each run. Tokens a second are those of the run's report, so starting a program or a cluster is not counted; `wall_s`
counts it. `beside_s` are seconds of a processor that were not spent in training, which say more on a busy machine: from Python those of the
thread that hears the events; through Ray those of the driver's process, and of its node's threads that are not Hydra's.
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
    "devices": os.environ.get("DEVICES", "cpu:2x1"), "device_memory": "128MiB",
}

PYTHON = """
import json, sys, time
import hydra_train as hydra
begun = time.thread_time()
run = hydra.select(**json.loads(sys.argv[1]), out=sys.argv[2])
for event in run:
    pass
print(json.dumps(run.report | {"beside_s": time.thread_time() - begun}))
"""

#: A node's process has its peak of memory under its own name.
RAY = """
import json, logging, sys, threading, time
from pathlib import Path
import ray
from hydra_train import ray as hydra_ray
ray.init(num_cpus=1, log_to_driver=False, include_dashboard=False)
peak, ticks, watched, ended = [0], {}, [0.0], threading.Event()
def watch():
    while not ended.wait(1):
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if b"ray::Node" in (process / "cmdline").read_bytes():
                    look(process)
            except OSError:
                pass
        watched[0] = time.thread_time()
def look(process):
    peak[0] = max([peak[0], *(int(l.split()[1]) for l in (process / "status").read_text().splitlines() if l.startswith("VmHWM"))])
    for thread in (process / "task").iterdir():
        name, _, rest = (thread / "stat").read_text().partition("(")[2].rpartition(")")
        fields = rest.split()
        ticks[thread.name] = (name, int(fields[11]) + int(fields[12]))
threading.Thread(target=watch, daemon=True).start()
begun = time.process_time()
hydra_ray.select(storage_path=sys.argv[2], **json.loads(sys.argv[1]))
driver = time.process_time() - begun
ended.set()
(run,) = Path(sys.argv[2], "runs").iterdir()
names = {}
for name, spent in ticks.values():
    names[name] = names.get(name, 0) + spent / 100
more = {"node_peak_kib": peak[0], "beside_s": driver - watched[0], "node_threads_s": names}
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
        environment = os.environ | {"HYDRA_LEDGER": ""}
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
        "beside_s": report.get("beside_s"),
        "node_threads_s": report.get("node_threads_s"),
        "processor_s": used.ru_utime + used.ru_stime,
        "wall_s": time.monotonic() - begun,
        "load": os.getloadavg()[0],
        "weights_sha256": sorted(task["weights_sha256"] for task in report["tasks"]),
    }


def main() -> None:
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    out, repeats = Path(arguments[0]), int(arguments[1]) if len(arguments) > 1 else 5
    variants = ["command line", "python"] + ([] if "--without-ray" in sys.argv else ["ray"])
    rows = []
    with out.open("w") as file:
        for repeat in range(repeats):
            # Each is as often the first, so that a machine whose speed drifts favours none.
            for variant in variants[repeat % len(variants) :] + variants[: repeat % len(variants)]:
                rows.append(measured(variant))
                file.write(json.dumps(rows[-1]) + "\n")
                file.flush()
    assert len({tuple(row["weights_sha256"]) for row in rows}) == 1, "the weights differ"
    of = {variant: [row for row in rows if row["variant"] == variant] for variant in variants}
    for variant in variants:
        speeds = [row["tokens_per_s"] for row in of[variant]]
        # Neighbours in time, so that what else the machine does weighs on both.
        ratios = [mine / base["tokens_per_s"] for mine, base in zip(speeds, of["command line"])]
        print(
            f"{variant}: {statistics.median(speeds):.0f} tokens/s ({min(speeds):.0f} to {max(speeds):.0f}), "
            f"over the command line's {statistics.median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f}), "
            f"peak {statistics.median(row['peak_mib'] for row in of[variant]):.0f} MiB"
        )


if __name__ == "__main__":
    main()
