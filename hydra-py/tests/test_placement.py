"""Placement on nodes: a pure function, on simulated workloads. No cluster is needed."""

from __future__ import annotations

import random

import pytest

from hydra_train._cluster.placement import Node, moves, place


def workload(seed: int) -> tuple[dict[str, dict[str, float]], dict[str, Node], float]:
    """100 models on 16 unequal nodes, and a time before which no placement ends."""
    draw = random.Random(seed)
    work = {f"m{i}": draw.lognormvariate(0, 1.0) for i in range(100)}
    speeds = {f"n{i}": draw.choice([1.0, 1.5, 2.0, 4.0]) for i in range(16)}
    nodes = {name: Node(draw.choice([1, 1, 2, 4])) for name in speeds}
    seconds = {task: {name: w / speed for name, speed in speeds.items()} for task, w in work.items()}
    devices = [speeds[name] for name, node in nodes.items() for _ in range(node.devices)]
    return seconds, nodes, bound(sorted(work.values(), reverse=True), sorted(devices, reverse=True))


def bound(work: list[float], devices: list[float]) -> float:
    """The first time, to a thousandth, at which nothing speaks against an end: the k longest models have at most the k fastest
    devices, and models that take longer than that on slower ones have the faster ones alone."""
    least, most = 0.0, sum(work) / devices[0]
    while most - least > 1e-3 * most:
        end = (least + most) / 2
        possible = all(sum(work[:k]) <= end * sum(devices[:k]) for k in range(1, len(work) + 1))
        for slow in set(devices):
            kept = [w for w in work if w > end * slow]
            fast = [speed for speed in devices if speed > slow]
            possible = possible and all(sum(kept[:k]) <= end * sum(fast[:k]) for k in range(1, len(kept) + 1))
        least, most = (least, end) if possible else (end, most)
    return least


@pytest.mark.parametrize("seed", range(40))
def test_a_hundred_models_on_sixteen_unequal_nodes_end_within_a_tenth_of_the_bound(seed: int) -> None:
    seconds, nodes, least = workload(seed)
    placed = place(list(seconds), seconds, nodes)
    assert sorted(task for tasks in placed.values() for task in tasks) == sorted(seconds)
    ends = [Node(nodes[name].devices, {task: seconds[task][name] for task in tasks}).end() for name, tasks in placed.items()]
    assert max(ends) <= 1.1 * least, max(ends) / least
    assert placed == place(list(reversed(seconds)), seconds, nodes), "it depends on the order in which tasks are named"


def test_tasks_go_only_where_there_is_room() -> None:
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
    assert moves(nodes, ["b", "c"], seconds, least_gain_s=60.0) == {}, "it is not worth it"
    assert moves({"a": Node(1, {"t": 5.0}), "b": Node(1)}, ["b"], seconds, 0.0) == {}, "the last task stays where it is"
    slow = {task: {"a": 5.0, "b": 100.0} for task in seconds}
    assert moves(nodes, ["b"], slow, 0.0) == {}, "a slow node would end later"
    assert moves(nodes, [], seconds, 0.0) == {}
