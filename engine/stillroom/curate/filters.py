"""Filtering rollouts: each filter on its own and together, every dropped row with its reasons."""

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from stillroom.curate.convert import MAX_EXAMPLES
from stillroom.curate.rows import (
    RolloutFacts,
    RolloutLine,
    check_output,
    read_rollouts,
    without_ids,
)
from stillroom.data.row_files import rollout_files
from stillroom.files import atomic_output, canonical_json
from stillroom.lineage import write_manifest
from stillroom.settings import Workspace

ANY_TOOL = "any"
NOT_A_ROLLOUT = "not a rollout row"


class FilterDataset(BaseModel):
    """Ask for the rollouts that pass every given filter; a filter left out lets all pass."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input: Annotated[str, Field(description="Rollouts file or folder; also of rnow or NeMo Gym")]
    output: Annotated[str, Field(description="Rows that pass; replaced when complete")]
    min_reward: float | None = None
    success: Annotated[bool | None, Field(description="Keep only these")] = None
    min_turns: Annotated[int | None, Field(ge=0, description="Assistant turns")] = None
    max_turns: Annotated[int | None, Field(ge=1)] = None
    require_final_answer: Annotated[
        bool, Field(description="Must end with text, not with a tool call")
    ] = False
    require_tool_use: Annotated[
        str | None, Field(description="any, or the name of a tool that must have been called")
    ] = None
    max_tool_errors: Annotated[int | None, Field(ge=0)] = None
    dedupe: Annotated[bool, Field(description="Drop rows with the same messages")] = False
    max_per_category: Annotated[
        int | None, Field(ge=1, description="Keep at most so many of each category, at random")
    ] = None
    category_field: Annotated[str, Field(description="Metadata field of the category")] = (
        "task_type"
    )
    seed: int = 0


class FilterResult(msgspec.Struct, frozen=True, kw_only=True):
    """What filtering came to. read = kept + the sum of dropped, always."""

    output: str
    read: int
    kept: int
    dropped: dict[str, int]
    """By the first reason; the side file has all reasons of each row."""
    dropped_file: str
    categories_before: dict[str, int]
    categories_after: dict[str, int]
    success_derived: int
    """Rollouts without `success`: their reward (from 0.5), else a complete answer, decided."""
    problems: list[str]
    """The first lines that are no rollouts, with file:line."""


class DroppedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the side file."""

    file: str
    line: int
    id: str | None
    reasons: list[str]


class _Messages(msgspec.Struct):
    messages: list[dict[str, Any]]


_MESSAGES = msgspec.json.Decoder(_Messages)
Rule = Callable[[RolloutFacts], str | None]


def rules_of(request: FilterDataset) -> list[Rule]:
    """Returns the filters that were asked for; each gives a reason to drop a row, or None."""
    rules: list[Rule] = []
    if (least := request.min_reward) is not None:
        rules.append(lambda row: None if _reward_reaches(row, least) else f"reward below {least:g}")
    if (wanted := request.success) is not None:
        word = "no success" if wanted else "a success"
        rules.append(lambda row: None if row.is_success == wanted else word)
    if (fewest := request.min_turns) is not None:
        rules.append(lambda row: None if row.num_turns >= fewest else f"under {fewest} turns")
    if (most := request.max_turns) is not None:
        rules.append(lambda row: None if row.num_turns <= most else f"over {most} turns")
    if request.require_final_answer:
        rules.append(lambda row: None if row.has_final_answer else "no final answer")
    if (tool := request.require_tool_use) is not None:
        rules.append(lambda row: None if _uses(row, tool) else f"tool use missing ({tool})")
    if (errors := request.max_tool_errors) is not None:
        rules.append(
            lambda row: None if (row.tool_errors or 0) <= errors else f"over {errors} tool errors"
        )
    return rules


def _reward_reaches(row: RolloutFacts, least: float) -> bool:
    return row.reward is not None and row.reward >= least


def _uses(row: RolloutFacts, tool: str) -> bool:
    return bool(row.tools_used) if tool == ANY_TOOL else tool in row.tools_used


def filter_dataset(workspace: Workspace, request: FilterDataset) -> FilterResult:
    """Writes the rows that pass, untouched, and the others' reasons; returns the counts."""
    source = workspace.existing(request.input, what="input")
    output = workspace.output_file(request.output, what="output")
    dropped_file = output.with_name(output.name + ".dropped")
    for path in (output, dropped_file):
        check_output(path, [source])
    chosen = _chosen_by_category(source, request) if request.max_per_category else None
    counts, problems = _Counts(), list[str]()
    with atomic_output(output) as kept, atomic_output(dropped_file) as dropped:
        for index, (rollout, found) in enumerate(_judged(source, request)):
            is_surplus = chosen is not None and not found and index not in chosen
            reasons = [f"over {request.max_per_category} of its category"] if is_surplus else found
            counts.add(rollout, reasons, request.category_field)
            if reasons:
                dropped.write(_dropped_row(rollout, reasons))
                if rollout.problem and len(problems) < MAX_EXAMPLES:
                    problems.append(f"{rollout.where}: {rollout.problem}")
            else:
                kept.write_raw(rollout.line.data)
    result = FilterResult(
        output=workspace.shown(output),
        read=counts.read,
        kept=counts.kept,
        dropped=dict(counts.dropped),
        dropped_file=workspace.shown(dropped_file),
        categories_before=dict(sorted(counts.before.items())),
        categories_after=dict(sorted(counts.after.items())),
        success_derived=counts.success_derived,
        problems=problems,
    )
    write_manifest(
        output,
        operation="filter_dataset",
        inputs=rollout_files(source),
        request=request.model_dump(mode="json"),
        counts={"read": counts.read, "kept": counts.kept},
    )
    return result


class _Counts:
    """What came in and what went out."""

    def __init__(self) -> None:
        self.read = self.kept = self.success_derived = 0
        self.dropped: Counter[str] = Counter()
        self.before: Counter[str] = Counter()
        self.after: Counter[str] = Counter()

    def add(self, rollout: RolloutLine, reasons: list[str], category_field: str) -> None:
        self.read += 1
        category = _category(rollout, category_field)
        self.before[category] += 1
        self.success_derived += rollout.facts is not None and rollout.facts.is_success_derived
        if reasons:
            self.dropped[reasons[0]] += 1
        else:
            self.kept += 1
            self.after[category] += 1


def _judged(source: Path, request: FilterDataset) -> Iterator[tuple[RolloutLine, list[str]]]:
    """Yields every row with the reasons to drop it."""
    rules = rules_of(request)
    seen: set[bytes] = set()
    for rollout in read_rollouts(source):
        facts = rollout.facts
        if facts is None:
            yield rollout, [NOT_A_ROLLOUT]
            continue
        reasons = [reason for rule in rules if (reason := rule(facts)) is not None]
        # Only rows that are kept otherwise can make another one a duplicate.
        if request.dedupe and not reasons:
            digest = _digest(rollout)
            if digest in seen:
                reasons.append("duplicate")
            seen.add(digest)
        yield rollout, reasons


def _digest(rollout: RolloutLine) -> bytes:
    """Returns what two rows share if and only if their messages say the same."""
    messages = [without_ids(message) for message in _MESSAGES.decode(rollout.own).messages]
    return hashlib.sha256(canonical_json(messages)).digest()[:16]


def _chosen_by_category(source: Path, request: FilterDataset) -> set[int]:
    """Returns the positions of a random `max_per_category` of each category's passing rows."""
    limit = request.max_per_category or 0
    source_of_chance = random.Random(request.seed)
    chosen: dict[str, list[int]] = {}
    passed: Counter[str] = Counter()
    for index, (rollout, reasons) in enumerate(_judged(source, request)):
        if reasons:
            continue
        category = _category(rollout, request.category_field)
        passed[category] += 1
        slots = chosen.setdefault(category, [])
        if len(slots) < limit:
            slots.append(index)
        elif (slot := source_of_chance.randrange(passed[category])) < limit:
            slots[slot] = index
    return {index for slots in chosen.values() for index in slots}


def _category(rollout: RolloutLine, field: str) -> str:
    if rollout.facts is None:
        return "(unreadable)"
    category = (rollout.facts.metadata or {}).get(field)
    return "(none)" if category is None else str(category)


def _dropped_row(rollout: RolloutLine, reasons: list[str]) -> DroppedRow:
    return DroppedRow(
        file=str(rollout.path),
        line=rollout.line.number,
        id=rollout.facts.id if rollout.facts else None,
        reasons=reasons,
    )
