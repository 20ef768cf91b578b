"""Assigns tasks to nodes: pure functions of predicted times, without a cluster or a clock.

A node computes one shard task of a model at a time on each of its devices, so the time of its tasks is the larger of their sum divided
by its devices and the longest task.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

#: The seconds of each task on each node where it fits, if it ran alone on one device.
Seconds = Mapping[str, Mapping[str, float]]

#: A move must save at least this share of the remaining time, to be worth its checkpoint.
MIN_GAIN = 0.1
#: The relative precision of the search for the earliest end.
PRECISION = 1e-3


@dataclass
class Node:
    """A node: its devices, and the remaining seconds of each of its tasks."""

    devices: int
    left: dict[str, float] = field(default_factory=dict)

    def end(self, without: Collection[str] = (), more: Iterable[float] = ()) -> float:
        """Returns the seconds until its tasks end, without the tasks ``without`` and with additional ones that take ``more`` seconds."""
        left = [seconds for task, seconds in self.left.items() if task not in without] + list(more)
        return max(sum(left) / self.devices, max(left)) if left else 0.0


def place(tasks: Collection[str], seconds: Seconds, nodes: Mapping[str, Node]) -> dict[str, list[str]]:
    """Assigns each task that fits on some node, in addition to the nodes' current tasks.

    Tries two heuristics, both with the longest tasks first: each task on the node where it ends first; and each task on the node where it
    fits best before a common end, which is made as early as possible. Improves both by moves and exchanges, and returns the one that ends
    earlier.
    """
    possible = {task: {node: s for node, s in seconds[task].items() if node in nodes} for task in tasks}
    longest = sorted((task for task in tasks if possible[task]), key=lambda task: (-min(possible[task].values()), task))
    movable = set(longest)
    placed = _where_it_ends_first(longest, possible, nodes)
    _better(placed, possible, movable)
    tight = _before_the_earliest_end(longest, possible, nodes, _end(placed))
    if tight is not None:
        _better(tight, possible, movable)
        placed = min(placed, tight, key=_end)
    return {name: sorted(movable & node.left.keys(), key=longest.index) for name, node in placed.items()}


def moves(nodes: Mapping[str, Node], idle: Collection[str], seconds: Seconds, least_gain_s: float) -> dict[str, list[str]]:
    """Returns the tasks that each node should release for idle nodes. Each move makes the end earlier by the share ``MIN_GAIN`` of the
    remaining time, and by ``least_gain_s`` seconds. ``seconds`` has the remaining seconds of each task on each node."""
    after = _copy(nodes)
    given: dict[str, list[str]] = {}
    while True:
        last = max(after, key=lambda name: (after[name].end(), name), default=None)
        if last is None or last in idle:
            return given
        end = after[last].end()
        found = [
            (max(after[last].end([task]), after[to].end(more=[seconds[task][to]])), task, to)
            for task in after[last].left
            for to in idle
            if to in after and to in seconds.get(task, {})
        ]
        best = min(found, default=None)
        if best is None or end - best[0] <= max(MIN_GAIN * end, least_gain_s):
            return given
        _, task, to = best
        del after[last].left[task]
        after[to].left[task] = seconds[task][to]
        given.setdefault(last, []).append(task)


def _end(placed: Mapping[str, Node]) -> float:
    return max((node.end() for node in placed.values()), default=0.0)


def _copy(nodes: Mapping[str, Node]) -> dict[str, Node]:
    return {name: Node(node.devices, dict(node.left)) for name, node in nodes.items()}


def _where_it_ends_first(longest: Iterable[str], possible: Seconds, nodes: Mapping[str, Node]) -> dict[str, Node]:
    placed = _copy(nodes)
    for task in longest:
        best = min(possible[task], key=lambda node: (placed[node].end(more=[possible[task][node]]), node))
        placed[best].left[task] = possible[task][best]
    return placed


def _before_the_earliest_end(
    longest: Collection[str], possible: Seconds, nodes: Mapping[str, Node], end: float
) -> dict[str, Node] | None:
    """Returns the earliest placement before ``end`` that bisection finds; None if there is none."""
    best, least, most = None, 0.0, end
    while most - least > PRECISION * most:
        tried = (least + most) / 2 if best is not None else most * (1 - PRECISION)
        placed = _before(tried, longest, possible, nodes)
        if placed is not None:
            best, most = placed, tried
        elif best is None:
            return None
        else:
            least = tried
    return best


def _before(end: float, longest: Iterable[str], possible: Seconds, nodes: Mapping[str, Node]) -> dict[str, Node] | None:
    """Places the longest tasks first, each on the node that then has the least time left before ``end``: short tasks fit anywhere, and
    long ones leave no gaps. Returns None if a task does not fit."""
    placed = _copy(nodes)
    free = {name: end * node.devices - sum(node.left.values()) for name, node in placed.items()}
    for task in longest:
        fits = [node for node, seconds in possible[task].items() if seconds <= end and seconds <= free[node]]
        if not fits:
            return None
        best = min(fits, key=lambda node: (free[node] - possible[task][node], node))
        placed[best].left[task] = possible[task][best]
        free[best] -= possible[task][best]
    return placed


def _better(placed: Mapping[str, Node], possible: Seconds, movable: AbstractSet[str]) -> None:
    # Each exchange makes the last node end earlier; the limit is more than any grid needs.
    for _ in range(10 * len(movable)):
        if not _exchange(placed, possible, movable):
            return


def _exchange(placed: Mapping[str, Node], possible: Seconds, movable: AbstractSet[str]) -> bool:
    """Moves a task away from the node that ends last, or exchanges it for another one, if both nodes then end earlier."""
    last = max(placed, key=lambda name: (placed[name].end(), name))
    node, end = placed[last], placed[last].end()
    best: tuple[float, str, str, str | None] | None = None
    for task in sorted(movable & node.left.keys()):
        for to, there in possible[task].items():
            if to == last:
                continue
            other = placed[to]
            back = [None, *sorted(t for t in movable & other.left.keys() if last in possible[t])]
            for swapped in back:
                returned = [] if swapped is None else [possible[swapped][last]]
                gone = [] if swapped is None else [swapped]
                after = max(node.end([task], returned), other.end(gone, [there]))
                if after < end and (best is None or after < best[0]):
                    best = (after, task, to, swapped)
    if best is None:
        return False
    _, task, to, back_task = best
    del node.left[task]
    placed[to].left[task] = possible[task][to]
    if back_task is not None:
        del placed[to].left[back_task]
        node.left[back_task] = possible[back_task][last]
    return True
