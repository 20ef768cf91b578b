"""The driver's decisions, with simulated nodes. No cluster is needed."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import hydra_train as hydra

pytest.importorskip("fsspec", reason="fsspec is not installed here: pip install 'hydra-train[ray]'")

from conftest import GRID  # noqa: E402
from hydra_train import _keywords  # noqa: E402
from hydra_train._cluster.driver import Driver, NodeLost  # noqa: E402
from hydra_train._cluster.node import Node, Status, build  # noqa: E402
from hydra_train._cluster.storage import Storage  # noqa: E402

TASKS = ["long", "middle", "short"]


def description(seconds: dict[str, float], **more: Any) -> dict[str, Any]:
    skipped = {task: "too large" for task in TASKS if task not in seconds}
    machine = {"processor": "p"}
    base = {"build": build(), "machine": machine, "inputs": ["same"], "devices": 1, "seconds": seconds, "skipped": skipped}
    return base | more


class Pretended:
    """A cluster whose nodes have the given descriptions, and end one task at each status request."""

    def __init__(self, nodes: dict[str, dict[str, Any]]) -> None:
        self.nodes = nodes
        self.dropped: list[str] = []
        self.status = {name: Status() for name in nodes}
        self.gone: set[str] = set()
        #: The nodes that are alive but do not answer.
        self.lost: set[str] = set()
        self.ends = True

    def alive(self) -> list[str]:
        return [name for name in self.nodes if name not in self.gone]

    def drop(self, node: str) -> None:
        self.dropped.append(node)

    def call(self, node: str, method: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        if node in self.gone | self.lost:
            answer.set_exception(NodeLost(node))
        else:
            answer.set_result(getattr(self, f"_{method}")(node, *arguments))
        return answer

    def _describe(self, node: str, probe: str, token: str) -> dict[str, Any]:
        return self.nodes[node]

    def _begin(self, node: str, run: str, tasks: list[str], sources: dict[str, str]) -> None:
        states = {task: {"state": "running", "step": 0, "steps": 10} for task in tasks}
        self.status[node] = Status(run, states, False)

    def _status(self, node: str) -> Status:
        status = self.status[node]
        running = [task for task, state in status.tasks.items() if state["state"] == "running"]
        if running and self.ends:
            status.tasks[running[0]]["state"] = "done"
        idle = not [task for task, state in status.tasks.items() if state["state"] == "running"]
        return Status(status.run, {task: dict(state) for task, state in status.tasks.items()}, idle)

    def _release(self, node: str, tasks: list[str]) -> None:
        for task in tasks:
            self.status[node].tasks[task]["state"] = "stopped"

    def _stop(self, node: str) -> None:
        pass


def driven(tmp_path: Path, nodes: dict[str, dict[str, Any]], **options: Any) -> tuple[Driver, Pretended]:
    cluster = Pretended(nodes)
    return Driver(cluster, Storage(tmp_path / "run"), ["--lr=1"], **options), cluster


def finish(driver: Driver) -> None:
    for _ in range(100):
        if driver.done:
            return
        driver.step()
    raise AssertionError(f"the grid does not end: {driver.history}")


def test_the_longest_task_goes_to_the_fastest_node(tmp_path: Path) -> None:
    seconds = {"long": 9.0, "middle": 4.0, "short": 3.0}
    fast = {task: s / 2 for task, s in seconds.items()}
    driver, _ = driven(tmp_path, {"slow": description(seconds), "fast": description(fast)})
    finish(driver)
    places = {task: node for what, task, node in driver.history if what == "place"}
    assert places == {"long": "fast", "middle": "slow", "short": "fast"}
    assert driver.ended == {task: "done" for task in TASKS}


def test_nodes_that_cannot_take_part_are_named_and_others_go_on(tmp_path: Path) -> None:
    seconds = {"long": 9.0, "middle": 4.0, "short": 3.0}
    nodes = {
        "good": description(seconds),
        "small": description({}),
        "old": description(seconds, build="another"),
        "other": description(seconds, inputs=["others"]),
    }
    driver, cluster = driven(tmp_path, nodes)
    finish(driver)
    assert sorted(driver.refused) == sorted(cluster.dropped) == ["old", "other", "small"]
    assert "none of the tasks fits in its memory: long: too large" in str(driver.refused["small"])
    assert "another build of hydra-train (another" in str(driver.refused["old"])
    assert "SHA-256 differ" in str(driver.refused["other"])
    assert {node for what, _, node in driver.history if what == "place"} == {"good"}


def test_where_no_node_can_take_part_the_error_has_the_reasons(tmp_path: Path) -> None:
    driver, _ = driven(tmp_path, {"a": description({}), "b": description({}, build="another")})
    with pytest.raises(hydra.HydraError, match="no node can take part") as caught:
        finish(driver)
    assert len(caught.value.causes) == 2


def test_a_task_that_fits_on_no_node_is_skipped(tmp_path: Path) -> None:
    some = {"middle": 4.0, "short": 3.0}
    driver, _ = driven(tmp_path, {"a": description(some), "b": description(some)})
    finish(driver)
    assert driver.ended == {"long": "skipped", "middle": "done", "short": "done"}
    assert "a: too large; b: too large" in driver.errors["long"]


def test_a_lost_nodes_tasks_go_to_others(tmp_path: Path) -> None:
    seconds = {"long": 9.0, "middle": 4.0, "short": 3.0}
    driver, cluster = driven(tmp_path, {"a": description(seconds), "b": description(seconds)})
    cluster.ends = False
    for _ in range(4):
        driver.step()
    (lost,) = [node for what, task, node in driver.history if (what, task) == ("place", "long")]
    cluster.gone.add(lost)
    cluster.ends = True
    finish(driver)
    assert ("lost", "long", lost) in driver.history
    assert [node for what, task, node in driver.history if (what, task) == ("place", "long")][1] != lost


def test_idle_nodes_take_tasks_of_loaded_ones(tmp_path: Path) -> None:
    seconds = {"long": 9.0, "middle": 4.0, "short": 3.0}
    driver, cluster = driven(tmp_path, {"a": description(seconds)}, least_gain_s=0.5)
    cluster.ends = False
    for _ in range(4):
        driver.step()
    # A node joins later, without tasks.
    cluster.nodes["b"], cluster.status["b"] = description(seconds), Status()
    for _ in range(6):
        driver.step()
    moved = [task for what, task, node in driver.history if what == "move"]
    assert moved == ["long"] and ("place", "long", "b") in driver.history
    cluster.ends = True
    finish(driver)


def test_a_driver_that_is_started_again_knows_what_has_ended(tmp_path: Path) -> None:
    run = tmp_path / "run/runs/0007-a-1"
    run.mkdir(parents=True)
    lines = [
        {"event": "checkpoint", "task": "long", "step": 4},
        {"event": "end", "task": "short", "state": "done", "error": None},
        {"event": "end", "task": "middle", "state": "stopped", "error": None},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"half')
    seconds = {"long": 9.0, "middle": 4.0, "short": 3.0}
    driver, cluster = driven(tmp_path, {"a": description(seconds)})
    assert (driver.ended, driver.sources) == ({"short": "done"}, {"long": "0007-a-1"})
    finish(driver)
    assert [task for what, task, _ in driver.history if what == "place"] == ["long", "middle"]
    assert all(node.run is not None and node.run > "0008" for node in driver.nodes.values())
    with pytest.raises(hydra.UsageError, match="has another grid"):
        Driver(cluster, Storage(tmp_path / "run"), ["--lr=2"])


def test_a_node_whose_process_ends_repeatedly_takes_no_part(tmp_path: Path) -> None:
    seconds = {"long": 9.0, "middle": 4.0, "short": 3.0}
    driver, cluster = driven(tmp_path, {"a": description(seconds), "b": description(seconds)})
    cluster.lost = {"b"}
    finish(driver)
    assert "it was lost 3 times" in str(driver.refused["b"])


class OneProcess:
    """A cluster of nodes in this process, which train."""

    def __init__(self, storage: Path, arguments: list[str], names: list[str]) -> None:
        self.nodes = {name: Node(str(storage), arguments, None) for name in names}

    def alive(self) -> list[str]:
        return list(self.nodes)

    def drop(self, node: str) -> None:
        self.nodes.pop(node).close()

    def call(self, node: str, method: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_result(getattr(self.nodes[node], method)(*arguments))
        return answer


def test_the_report_is_that_of_a_grid_whether_one_node_trained_it_or_two(tmp_path: Path) -> None:
    arguments = _keywords.arguments("select", {**GRID, "devices": "cpu:1x1", "progress": "none"})
    reports = []
    for names in (["one"], ["one", "two"]):
        storage = tmp_path / "-".join(names)
        cluster = OneProcess(storage, arguments, names)
        driver = Driver(cluster, Storage(storage), arguments)
        while not driver.done:
            driver.step()
            time.sleep(0.02)
        reports.append(driver.report(lambda: time.sleep(0.02)))
        driver.close()
        for name in names:
            cluster.drop(name)
    alone, both = reports
    assert (alone["state"], alone["notes"], len(alone["runs"])) == ("done", [], 1)
    assert alone.keys() == both.keys()
    assert all(task["run"] and task["rank"] for report in reports for task in report["tasks"])
    results = [[(task["name"], task["rank"], task["weights_sha256"]) for task in report["tasks"]] for report in reports]
    assert results[0] == results[1]
