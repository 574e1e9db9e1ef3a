"""The history of each layer in the pipeline: the layers that it came from, and the passes."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from onnx2ncnn_opt.rewrite.events import Applied

Row = tuple[int | None, int | None]
_Sequence = tuple[int, "_Sequence | None"]


@dataclass(frozen=True)
class Group:
    """Layers that rewrites connect: indices of the layers before and after, and the passes, in order."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    passes: tuple[str, ...]


def groups(before: Sequence[str], after: Sequence[str], applied: Iterable[Applied]) -> tuple[Group, ...]:
    """Group the layers with these names by the rewrites that connect them, in the order of the layers before.

    Two rewrites belong to one group if the second one consumes a layer of the first one's result. A layer that no
    rewrite created or removed is in no group.
    """
    events = list(applied)
    parent = list(range(len(events)))

    def root(event: int) -> int:
        while parent[event] != event:
            parent[event] = parent[parent[event]]
            event = parent[event]
        return event

    # By a layer's present name: its index in the net before, or the event that created it.
    originals = {name: number for number, name in enumerate(before)}
    creator: dict[str, int] = {}
    removed: dict[int, int] = {}
    for number, event in enumerate(events):
        for ref in event.before:
            if ref.name in creator:
                parent[root(creator.pop(ref.name))] = root(number)
            elif ref.name in originals:
                removed[originals.pop(ref.name)] = number
        for ref in event.after:
            creator[ref.name] = number
    members: dict[int, tuple[list[int], list[int], list[str]]] = {}
    for number, event in enumerate(events):
        members.setdefault(root(number), ([], [], []))[2].append(event.pass_name)
    for layer, number in sorted(removed.items()):
        members[root(number)][0].append(layer)
    for layer, name in enumerate(after):
        if name in creator:
            members[root(creator[name])][1].append(layer)
    all_groups = [Group(tuple(old), tuple(new), tuple(dict.fromkeys(names))) for old, new, names in members.values()]
    return tuple(sorted(all_groups, key=lambda group: (group.before or (len(before),), group.after)))


def side_by_side(before: int, after: int, partners: Mapping[int, int]) -> tuple[Row, ...]:
    """Return rows that show two lists side by side: every index of both once, in order, and partners in one row.

    `partners` maps indices after to indices before. If partners cross, the largest number of them shares rows.
    """
    # The longest increasing sequence of partners. For each length: the sequence with the smallest end, last one first.
    ends: list[int] = []
    sequences: list[_Sequence] = []
    for number in sorted(partners):
        length = bisect_left(ends, partners[number])
        ends[length : length + 1] = [partners[number]]
        sequences[length : length + 1] = [(number, sequences[length - 1] if length else None)]
    shared, sequence = [(before, after)], sequences[-1] if sequences else None
    while sequence is not None:
        number, sequence = sequence
        shared.insert(0, (partners[number], number))
    rows: list[Row] = []
    left = right = 0
    for row in shared:
        rows += ((number, None) for number in range(left, row[0]))
        rows += ((None, number) for number in range(right, row[1]))
        rows.append(row)
        left, right = row[0] + 1, row[1] + 1
    return tuple(rows[:-1])
