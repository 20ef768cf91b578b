"""Placement on nodes, on simulated workloads. No cluster is needed."""

from __future__ import annotations

import random
from bisect import bisect_right
from itertools import accumulate

import pytest

from hydra_train._cluster.placement import Node, moves, place


def workload(seed: int) -> tuple[dict[str, dict[str, float]], dict[str, Node], float]:
    """Returns 100 models on 16 unequal nodes, and a lower bound of the end of every placement."""
    draw = random.Random(seed)
    work = {f"m{i}": draw.lognormvariate(0, 1.0) for i in range(100)}
    speeds = {f"n{i}": draw.choice([1.0, 1.5, 2.0, 4.0]) for i in range(16)}
    nodes = {name: Node(draw.choice([1, 1, 2, 4])) for name in speeds}
    seconds = {task: {name: w / speed for name, speed in speeds.items()} for task, w in work.items()}
    machines = [(speeds[name], node.devices) for name, node in nodes.items()]
    return seconds, nodes, bound(sorted(work.values(), reverse=True), machines)


def bound(work: list[float], nodes: list[tuple[float, int]]) -> float:
    """Returns the latest time, to a thousandth, at which no placement can have ended."""
    least, most = 0.0, sum(work) / max(speed for speed, _ in nodes)
    while most - least > 1e-3 * most:
        end = (least + most) / 2
        least, most = (least, end) if is_possible(end, work, nodes) else (end, most)
    return least


def is_possible(end: float, work: list[float], nodes: list[tuple[float, int]]) -> bool:
    """Checks two necessary conditions for each k: the k longest models use at most the k fastest devices; and each of them is on one
    node, which trains the shortest of them in time, and has no more models than fit into its time."""
    devices = sorted((speed for speed, count in nodes for _ in range(count)), reverse=True)
    for k in range(1, len(work) + 1):
        longest = work[:k]
        capacities = [end * speed * count for speed, count in nodes if end * speed >= longest[-1]]
        used = list(accumulate(reversed(longest)))
        whole = sum(bisect_right(used, capacity) for capacity in capacities)
        if used[-1] > min(end * sum(devices[:k]), sum(capacities)) or whole < k:
            return False
    return True


@pytest.mark.parametrize("seeds", [range(first, first + 100) for first in range(0, 1000, 100)])
def test_a_hundred_models_on_sixteen_unequal_nodes_end_within_a_tenth_of_the_bound(seeds: range) -> None:
    for seed in seeds:
        seconds, nodes, least = workload(seed)
        placed = place(list(seconds), seconds, nodes)
        assert sorted(task for tasks in placed.values() for task in tasks) == sorted(seconds)
        ends = [Node(nodes[name].devices, {task: seconds[task][name] for task in tasks}).end() for name, tasks in placed.items()]
        assert max(ends) <= 1.1 * least, (seed, max(ends) / least)
        if seed % 10 == 0:
            assert placed == place(list(reversed(seconds)), seconds, nodes), "the placement depends on the order of the tasks"


def test_tasks_are_placed_only_where_they_fit() -> None:
    seconds = {"large": {"big": 9.0}, "small": {"big": 1.0, "little": 2.0}, "huge": {}}
    placed = place(list(seconds), seconds, {"big": Node(1), "little": Node(1)})
    assert placed == {"big": ["large"], "little": ["small"]}


def test_what_a_node_has_counts() -> None:
    nodes = {"a": Node(1, {"old": 10.0}), "b": Node(1)}
    assert place(["t", "u"], {"t": {"a": 1.0, "b": 1.0}, "u": {"a": 2.0, "b": 2.0}}, nodes) == {"a": [], "b": ["u", "t"]}


def test_idle_nodes_take_what_makes_the_end_come_earlier() -> None:
    nodes = {"a": Node(1, {"t": 5.0, "u": 5.0, "v": 5.0}), "b": Node(1), "c": Node(1)}
    seconds = {task: {name: 5.0 for name in nodes} for task in ("t", "u", "v")}
    given = moves(nodes, ["b", "c"], seconds, least_gain_s=1.0)
    assert len(given["a"]) == 2
    assert moves(nodes, ["b", "c"], seconds, least_gain_s=60.0) == {}, "the gain is too small"
    assert moves({"a": Node(1, {"t": 5.0}), "b": Node(1)}, ["b"], seconds, 0.0) == {}, "the last task is not moved"
    slow = {task: {"a": 5.0, "b": 100.0} for task in seconds}
    assert moves(nodes, ["b"], slow, 0.0) == {}, "a slow node would end later"
    assert moves(nodes, [], seconds, 0.0) == {}
