"""Which node trains which tasks: pure functions of predicted times, which know neither a cluster nor a clock.

A node computes one shard task of a model at a time on each of its devices, so its tasks take the larger of their sum over its
devices and the longest of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

#: The seconds of each task on each node that has room for it, were it alone on one device.
Seconds = Mapping[str, Mapping[str, float]]

#: A move must make the end come earlier by this share of what is left, or it is not worth its checkpoint.
WORTH = 0.1
#: An end is looked for to this share of it.
NARROW = 1e-3


@dataclass
class Node:
    """A node: its devices, and the seconds that are left of each task that it has."""

    devices: int
    left: dict[str, float] = field(default_factory=dict)

    def end(self, without: Collection[str] = (), more: Iterable[float] = ()) -> float:
        """The seconds until its tasks have ended, without some of them and with more."""
        left = [seconds for task, seconds in self.left.items() if task not in without] + list(more)
        return max(sum(left) / self.devices, max(left)) if left else 0.0


def place(tasks: Collection[str], seconds: Seconds, nodes: Mapping[str, Node]) -> dict[str, list[str]]:
    """A node for each of the tasks for which one has room, beside what the nodes have: the longest first, each where it ends
    first, or each where it fits best before an end that is made earlier and earlier, whichever of both ends earlier when moves and
    exchanges have made it better."""
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
    """The tasks that each node should give up to idle nodes: those with which what is left ends earlier, by a share of it and by
    ``least_gain_s`` seconds. ``seconds`` are those that are left of each task on each node."""
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
        if best is None or end - best[0] <= max(WORTH * end, least_gain_s):
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
    """A placement that ends before ``end``, as early as halving finds one."""
    best, least, most = None, 0.0, end
    while most - least > NARROW * most:
        tried = (least + most) / 2 if best is not None else most * (1 - NARROW)
        placed = _before(tried, longest, possible, nodes)
        if placed is not None:
            best, most = placed, tried
        elif best is None:
            return None
        else:
            least = tried
    return best


def _before(end: float, longest: Iterable[str], possible: Seconds, nodes: Mapping[str, Node]) -> dict[str, Node] | None:
    """The longest first, each on the node that has the least room left with it before ``end``: short ones find room anywhere, and
    long ones do not lie where they leave gaps. Nothing if one has none."""
    placed = _copy(nodes)
    room = {name: end * node.devices - sum(node.left.values()) for name, node in placed.items()}
    for task in longest:
        fits = [node for node, seconds in possible[task].items() if seconds <= end and seconds <= room[node]]
        if not fits:
            return None
        best = min(fits, key=lambda node: (room[node] - possible[task][node], node))
        placed[best].left[task] = possible[task][best]
        room[best] -= possible[task][best]
    return placed


def _better(placed: Mapping[str, Node], possible: Seconds, movable: AbstractSet[str]) -> None:
    # Each exchange makes the last node end earlier; so many are more than any grid needs.
    for _ in range(10 * len(movable)):
        if not _exchange(placed, possible, movable):
            return


def _exchange(placed: Mapping[str, Node], possible: Seconds, movable: AbstractSet[str]) -> bool:
    """Moves a task from the node that ends last, or exchanges one of its tasks for another, if one of both ends earlier then."""
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
