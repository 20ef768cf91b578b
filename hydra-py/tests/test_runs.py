"""Runs: the bits of the command line, events, results, and the ends of runs."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hydra_train as hydra
from conftest import ENDLESS, GRID


def lines(run: hydra.Run) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]


def test_the_bits_are_those_of_the_command_line(tmp_path: Path, hydra_program: Path) -> None:
    flags = "--batch 4 --lr 1e-3,3e-4 --context 32 --devices cpu:2x1 --device-memory 64MiB --steps 2 --cuts 2,4"
    out = ["--json", "--out", str(tmp_path / "cli")]
    program = subprocess.run([hydra_program, "select", *flags.split(), *out], check=True, capture_output=True)
    there = {task["name"]: task for task in json.loads(program.stdout)["tasks"]}
    run = hydra.select(**GRID, out=tmp_path / "python").wait()
    assert run.state == "done"
    assert set(run.tasks) == set(there) == {"lr1e-3", "lr3e-4"}
    for name, task in run.tasks.items():
        assert task.weights_sha256 == there[name]["weights_sha256"]
        assert task.losses == there[name]["losses"] and task.test == there[name]["test"]
    spec = [(tmp_path / name / "spec.toml").read_text() for name in ("cli", "python")]
    assert spec[0] == spec[1]
    assert run.report == json.loads((run.directory / "report.json").read_text())


def test_events_are_the_lines_of_the_metrics_and_end() -> None:
    run = hydra.select(**GRID)
    events = list(run)
    assert events == lines(run) == list(run)
    kinds = [event["event"] for event in events]
    assert kinds.count("task") == kinds.count("end") == 2 and kinds.count("minibatch") == 4
    assert run.state == "done"


def test_results_are_ranked_and_flat() -> None:
    run = hydra.select(**GRID).wait()
    rows = run.leaderboard
    assert [row["rank"] for row in rows] == [1, 2]
    assert rows[0]["validation_loss"] <= rows[1]["validation_loss"]
    best = run.best
    assert (best.name, best.rank, best.state, best.steps) == (rows[0]["task"], 1, "done", 2)
    assert best.validation is not None and best.validation["loss"] == rows[0]["validation_loss"]
    assert best.model_dir is not None and (best.model_dir / "model.safetensors").is_file()
    evaluated = hydra.evaluate(
        model=best.model_dir, split="validation", batch=4, context=32, device_memory="64MiB"
    )
    assert evaluated["loss"] == best.validation["loss"]
    report = hydra.report(run.directory)
    assert [task["name"] for task in report["tasks"]] == [row["task"] for row in rows]


def test_the_parts_of_a_grid_have_one_report() -> None:
    whole = hydra.select(**GRID).wait()
    parts = [hydra.select(**GRID, part=f"{part}/2").wait().directory for part in (1, 2)]
    report = hydra.report(*parts)
    assert report["state"] == "done" and report["notes"] == []
    assert [(task["rank"], task["weights_sha256"]) for task in report["tasks"]] == [
        (task.rank, task.weights_sha256) for task in whole.tasks.values()
    ]
    assert hydra.report(parts[0])["tasks"][0]["state"] == "done"


def test_a_search_ends_with_one_trial_that_is_done() -> None:
    settings = {key: value for key, value in GRID.items() if key not in ("lr", "steps")}
    named = {"lr": "log:1e-4..1e-2", "weight_decay": [0, 0.1]}
    run = hydra.select(**settings, search="halving", trials=3, steps=3, sample=named).wait()
    states = [task.state for task in run.tasks.values()]
    assert run.state == "done" and sorted(states) == ["done", "stopped", "stopped"]
    assert run.best.state == "done" and run.best.steps == 3
    again = hydra.select(**settings, search="halving", trials=3, steps=3, sample=["lr=log:1e-4..1e-2", "weight_decay=0,0.1"])
    assert again.wait().best.weights_sha256 == run.best.weights_sha256


def test_a_leaderboard_is_a_data_frame() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed here")
    run = hydra.select(**GRID).wait()
    frame = run.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["task"]) == [row["task"] for row in run.leaderboard]


def test_without_pandas_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    run = hydra.select(**GRID).wait()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(hydra.HydraError, match="pip install pandas"):
        run.to_pandas()


def test_a_task_is_stopped_alone() -> None:
    run = hydra.select(**(ENDLESS | {"devices": "cpu:2x1", "lr": [1e-3, 3e-4]}))
    stopped, other = "lr1e-3", "lr3e-4"
    for event in run:
        if event["event"] == "minibatch" and event["task"] == stopped:
            run.tasks[stopped].stop()
        if event["event"] == "end":
            assert (event["task"], event["state"]) == (stopped, "stopped")
            assert run.tasks[stopped].state == "stopped" and run.tasks[other].state == "running"
            break
    run.stop()
    assert run.wait().state == "stopped"
    assert all(task.state == "stopped" and task.model_dir for task in run.tasks.values())


def test_a_stopped_task_stays_so_when_the_run_is_resumed() -> None:
    run = hydra.select(**(ENDLESS | {"lr": [1e-3, 3e-4], "checkpoint_every": 1}))
    stopped, other = "lr1e-3", "lr3e-4"
    next(event for event in run if event["event"] == "minibatch")
    place = run.tasks[stopped].stop()
    assert run.tasks[stopped].stop() == place, "a task is stopped once"
    next(event for event in run if event["event"] == "end")
    run.stop()
    run.wait()
    commands = [json.loads(line) for line in (run.directory / "control.jsonl").read_text().splitlines()]
    assert {(one["command"], one["task"], one["at"]) for one in commands} == {("stop", stopped, place)}
    before = run.tasks[stopped]
    resumed = hydra.resume(run.directory)
    next(event for event in resumed if event["event"] == "minibatch" and event["task"] == other)
    resumed.stop()
    after = resumed.wait().tasks[stopped]
    assert (after.state, after.steps, after.weights_sha256) == ("stopped", place, before.weights_sha256)
    assert resumed.tasks[other].steps >= run.tasks[other].steps


def test_lists_of_any_setting_are_a_grid_over_epochs() -> None:
    settings = {key: value for key, value in GRID.items() if key not in ("steps", "lr")}
    settings |= {"weight_decay": [0, 0.1], "optimizer": ["adamw", "lion"], "warmup": 0.1, "epochs": 1}
    admission = hydra.select(**settings, dry_run=True).wait().report
    assert len(admission["tasks"]) == 4
    assert len(hydra.explain(**settings)["tasks"]) == 4


def test_a_run_that_is_stopped_goes_on_to_the_same_bits() -> None:
    settings = GRID | {"steps": 12, "lr": 1e-3, "checkpoint_every": 1}
    whole = hydra.select(**settings, out="whole").wait()
    run = hydra.select(**settings, out="stopped")
    next(event for event in run if event["event"] == "minibatch")
    run.stop()
    assert run.wait().best.steps < 12
    resumed = hydra.resume(run.directory)
    events = list(resumed)
    assert any(event["event"] == "resumed" for event in events)
    assert events == lines(resumed)[-len(events) :]
    assert resumed.best.weights_sha256 == whole.best.weights_sha256
    # Nothing is left to do, and the report exists.
    assert hydra.resume(run.directory).wait().best.steps == 12


def test_others_go_on_while_a_run_trains() -> None:
    with hydra.train(**ENDLESS) as run:
        finished = threading.Event()
        threading.Thread(target=finished.set).start()
        assert finished.wait(60)
        with pytest.raises(TimeoutError):
            run.wait(0.2)
        assert run.state == "running" and [task.name for task in run.tasks.values()] == ["b2-lr3e-4"]
        run.stop()
    assert run.state == "stopped"


def test_an_exception_that_leaves_the_block_stops_the_run() -> None:
    with pytest.raises(KeyError, match="mine"):
        with hydra.train(**ENDLESS) as run:
            next(event for event in run if event["event"] == "minibatch")
            raise KeyError("mine")
    assert run.state == "stopped"


def test_a_dry_run_and_an_explanation_train_nothing() -> None:
    run = hydra.select(**GRID, dry_run=True).wait()
    assert {task["name"] for task in run.report["tasks"]} == {"lr1e-3", "lr3e-4"}
    with pytest.raises(hydra.HydraError, match="dry run"):
        run.directory
    assert hydra.explain(**GRID)["prediction"]
    assert not Path("runs").exists()


INTERRUPTED = """
import hydra_train as hydra

run = hydra.train(**SETTINGS, out="run")
next(event for event in run if event["event"] == "minibatch")
with CONTEXT:
    print("trains", flush=True)
    WAIT
"""


@pytest.mark.skipif(os.name == "nt", reason="signals are sent as on Unix")
@pytest.mark.parametrize("context", ["run", "contextlib.nullcontext()"])
@pytest.mark.parametrize("wait", ["run.wait()", "for event in run: pass"])
def test_an_interrupt_loses_nothing(wait: str, context: str) -> None:
    # The interrupt may arrive before, during or after the wait. The end of a block stops its run, and so does the end of the program.
    script = "import contextlib\n" + INTERRUPTED.replace("SETTINGS", repr(ENDLESS))
    script = script.replace("CONTEXT", context).replace("WAIT", wait)
    child = program(script)
    assert child.stdout is not None and child.stdout.readline() == "trains\n"
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=300)
    assert child.returncode != 0 and "KeyboardInterrupt" in err, err
    is_stopped_and_written()


def test_a_program_that_ends_stops_its_run() -> None:
    child = program(INTERRUPTED.replace("SETTINGS", repr(ENDLESS)).replace("with CONTEXT", "if True").replace("WAIT", ""))
    _, err = child.communicate(timeout=300)
    assert child.returncode == 0, err
    is_stopped_and_written()


def program(script: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    # A process in the background may ignore interrupts, and its children inherit that.
    restore = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen([sys.executable, "-c", script], stdout=pipe, stderr=pipe, text=True, preexec_fn=restore)


def is_stopped_and_written() -> None:
    task = json.loads(Path("run/report.json").read_text())["tasks"][0]
    assert task["state"] == "stopped" and Path(task["model_dir"], "model.safetensors").is_file()


class InterruptedOnce:
    """A running command whose first wait is interrupted."""

    def __init__(self, running: Any) -> None:
        self._running, self._interrupted = running, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._running, name)

    def wait(self, timeout: float | None = None) -> Any:
        if not self._interrupted:
            self._interrupted = True
            raise KeyboardInterrupt
        return self._running.wait(timeout)

    def events(self) -> Any:
        yield '{"event": "first"}'
        self.wait()


@pytest.mark.parametrize("waits", [hydra.Run.wait, list])
def test_an_interrupt_is_raised_when_the_run_has_stopped(waits: Callable[[hydra.Run], object]) -> None:
    run = hydra.train(**ENDLESS)
    next(event for event in run if event["event"] == "minibatch")
    run._running = InterruptedOnce(run._running)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        waits(run)
    assert run.state == "stopped" and run.best.model_dir is not None


def test_texts_are_generated_from_python_objects(tmp_path: Path) -> None:
    run = hydra.train(batch=4, context=32, steps=2, devices="cpu:1x1", device_memory="64MiB").wait()
    made = run.best.generate(["ab", [97, 98], "xyz"], max_new_tokens=5)
    assert [len(row["token_ids"]) for row in made] == [5, 5, 5]
    assert made[0]["token_ids"] == made[1]["token_ids"] and made[1]["prompt"] == "ab"
    assert made[2]["finish_reason"] == "length" and made[2]["adapter"] is None
    one = hydra.generate("ab", model=run.best.model_dir, max_new_tokens=5, devices="cpu:2x1")
    assert one == made[:1]
    assert hydra.generate([97, 98], model=run.best.model_dir, max_new_tokens=5) == made[:1]
    (tmp_path / "prompts.txt").write_text("ab\nxyz\n")
    by_name = hydra.generate(prompts=["xyz"], model=run.best.model_dir, max_new_tokens=5)
    assert by_name == hydra.generate(prompt="xyz", model=run.best.model_dir, max_new_tokens=5) == [made[2]]
    # Python, unlike JSON, counts U+2028 as the end of a line.
    (row,) = hydra.generate("a\u2028b", model=run.best.model_dir, max_new_tokens=5)
    assert row["prompt"] == "a\u2028b"
    with pytest.raises(hydra.UsageError, match="given twice"):
        hydra.generate("ab", model=run.best.model_dir, prompts=["xyz"])
    from_file = hydra.generate(tmp_path / "prompts.txt", model=run.best.model_dir, max_new_tokens=5)
    assert from_file == [made[0], made[2]]
    with pytest.raises(hydra.UsageError, match="prompt 1 is a float"):
        hydra.generate(["a", 1.5], model=run.best.model_dir)
    with pytest.raises(hydra.UsageError, match="--top-p applies to sampling"):
        hydra.generate("a", model="bytes-tiny", top_p=0.5)


QUESTIONS = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(8)]


def length(prompt: str, text: str, reference: str) -> float:
    """Counts the characters of a text, fewer being better."""
    assert prompt.endswith("+1=") and reference == str(int(prompt[0]) + 1)
    return float(len(text))


length.higher_is_better = False  # type: ignore[attr-defined]


def test_a_function_of_generated_texts_is_a_metric(tmp_path: Path) -> None:
    data = {"train": QUESTIONS * 4, "validation": QUESTIONS}
    settings: dict[str, Any] = {"model": "bytes-tiny", "data": data, "batch": 4, "epochs": 2, "eval_every": 8, "sample_tokens": 5}
    run = hydra.select(**settings, lr=[3e-3, 1e-5], metric=length, sample_prompts=["1+1=", "ab"], out=tmp_path / "run").wait()
    for task in run.tasks.values():
        assert task.validation is not None
        assert 0 <= task.validation["metrics"]["length"] <= 5
        assert task.validation["selected_by"] == {"name": "length", "higher_is_better": False}
    samples = [event for event in lines(run) if event["event"] == "samples"]
    assert len(samples) == 4
    assert [sample["prompt"] for sample in samples[0]["samples"]] == ["1+1=", "ab"]  # type: ignore[attr-defined]
    report = run.report
    assert hydra.resume(run.directory, metric=length).wait().report["tasks"] == report["tasks"]


def test_a_metric_that_raises_fails_its_task_with_the_traceback(tmp_path: Path) -> None:
    def broken(prompt: str, text: str, reference: str) -> float:
        raise ValueError("no such word")

    data = {"train": QUESTIONS, "validation": QUESTIONS}
    run = hydra.train(model="bytes-tiny", data=data, batch=4, metric=broken, out=tmp_path / "run")
    with pytest.raises(hydra.TasksFailed) as raised:
        run.wait()
    assert "no such word" in str(raised.value) and "in broken" in str(raised.value)
    with pytest.raises(hydra.UsageError, match="give it a name"):
        hydra.train(metric=lambda prompt, text, reference: 0.0)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not report the memory of a process")
def test_the_memory_of_a_run_is_free_after_it() -> None:
    def resident() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) << 10

    before = resident()
    # 7 million parameters: 12 bytes of each on the host, more on the device.
    run = hydra.train(model="gpt2-mini", context=64, batch=2, steps=2, devices="cpu:1x1").wait()
    memory = run.report["process"]
    assert memory["peak_bytes"] - before >= 12 * run.report["tasks"][0]["parameters"]
    assert resident() - before <= (memory["peak_bytes"] - before) / 2
