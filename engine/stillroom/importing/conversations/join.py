"""Decides which rows are one rollout, and which rollout branches from which."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from stillroom.importing.conversations.call_tree import NONE, CallTree
from stillroom.importing.conversations.row_table import RowTable


@dataclass(frozen=True, slots=True)
class JoinedRows:
    """The rollouts that rows make; a rollout is known by its kept row, which is its last call."""

    owners: Sequence[int]
    """For each row, the kept row of the rollout that it is a part of."""
    kept: Sequence[int]
    """The kept rows, in the order of the sources."""
    branch_of: dict[int, int]
    """The rollouts that begin as another one, or were begun by it, with that other one."""


def joined_rows(rows: RowTable, tree: CallTree) -> JoinedRows:
    """Returns the rollouts that the rows make.

    Where conversations part, the longest goes on as the main one, of several the first, and has all
    calls before; the others are branches of it.
    """
    owners = array("i", [NONE]) * len(rows)
    for row in range(len(rows)):
        if rows.nodes[row] == NONE:
            owners[row] = row
    branch_of = _joined_calls(rows, tree, owners)
    if rows.has_parents:
        _link_to_parents(rows, owners, branch_of)
    kept = [row for row, owner in enumerate(owners) if owner == row]
    return JoinedRows(owners, kept, branch_of)


def _joined_calls(rows: RowTable, tree: CallTree, owners: "array[int]") -> dict[int, int]:
    """Sets the owners of calls, and returns the branches that the messages show."""
    node_owners = array("i", [NONE]) * tree.num_nodes
    branch_of: dict[int, int] = {}
    main_of_group: dict[int, int] = {}
    ends = [(next(tree.rows_at(node)), node) for node in tree.ends()]
    ends.sort(key=lambda end: (-rows.lengths[end[0]], end[0]))
    for kept, end in ends:
        node = end
        while node != NONE and node_owners[node] == NONE:
            node_owners[node] = kept
            for row in tree.rows_at(node):
                owners[row] = kept
            node = tree.parent(node)
        group = rows.group(kept)
        if node != NONE and (group or tree.has_user(node)):
            branch_of[kept] = node_owners[node]
        elif group in main_of_group:
            branch_of[kept] = main_of_group[group]
        if group:
            main_of_group.setdefault(group, kept)
    return branch_of


def _link_to_parents(rows: RowTable, owners: Sequence[int], branch_of: dict[int, int]) -> None:
    """Adds the branches of which the source itself says where they begin."""
    by_id = rows.by_id()
    for row, kept in enumerate(owners):
        parent = by_id.get(rows.parent(row)) if rows.parent(row) else None
        if parent is None or kept in branch_of or owners[parent] == kept:
            continue
        above: int | None = owners[parent]
        while above is not None and above != kept:
            above = branch_of.get(above)
        if above is None:  # else it would be a branch of its own branch
            branch_of[kept] = owners[parent]
