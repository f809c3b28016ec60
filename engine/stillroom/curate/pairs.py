"""Preference pairs: rollouts of one task that came out differently, cut where they part."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, model_validator

from stillroom.curate.rows import check_output, own_row, read_rollouts, without_ids
from stillroom.data.layouts import RolloutLayout
from stillroom.data.row_files import RowReader, rollout_files
from stillroom.errors import DataError
from stillroom.files import LineWriter, atomic_output
from stillroom.lineage import write_manifest
from stillroom.settings import Workspace


class MakeDpoPairs(BaseModel):
    """Ask for preference pairs from rollouts of the same tasks with different rewards."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input: Annotated[
        str | None, Field(description="Rollouts to compare with each other, by task")
    ] = None
    chosen_from: Annotated[
        str | None, Field(description="Instead: chosen only from these, e.g. the teacher's")
    ] = None
    rejected_from: Annotated[
        str | None, Field(description="and rejected only from these, e.g. the student's")
    ] = None
    output: Annotated[str, Field(description="Pairs (.jsonl); replaced when complete")]
    strategy: Annotated[
        Literal["best_worst", "all", "adjacent"],
        Field(description="Which rollouts of a task are paired"),
    ] = "best_worst"
    min_difference: Annotated[float, Field(gt=0, description="Least difference of rewards")] = 0.1
    max_pairs_per_task: Annotated[
        int | None, Field(ge=1, description="Those with the largest difference")
    ] = None
    cut: Annotated[
        Literal["first_turn", "none"],
        Field(description="first_turn: only the first turn that differs; none: all that follows"),
    ] = "first_turn"

    @model_validator(mode="after")
    def _one_source(self) -> "MakeDpoPairs":
        both = self.chosen_from is not None and self.rejected_from is not None
        neither = self.chosen_from is None and self.rejected_from is None
        if not ((self.input is not None and neither) or (self.input is None and both)):
            raise ValueError("give either input, or chosen_from and rejected_from")
        if both and self.strategy == "adjacent":
            raise ValueError("strategy adjacent needs input: it ranks the rollouts of one file")
        return self


class PairsResult(msgspec.Struct, frozen=True, kw_only=True):
    """What pairing came to."""

    output: str
    read: int
    """Rollouts, those included that could not take part."""
    tasks: int
    """On the chosen side, with a rollout that could take part."""
    tasks_with_pairs: int
    pairs: int
    skipped: dict[str, int]
    """Rollouts and pairs that were left out, by reason."""
    mean_difference: float


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a rollout is, and what it is worth."""

    path: Path
    offset: int
    num_bytes: int
    reward: float
    is_own: bool
    """Whether it is written in our layout."""


class _Row(msgspec.Struct):
    """The fields that a pair needs."""

    messages: list[dict[str, Any]]
    tools: msgspec.Raw = msgspec.Raw(b"[]")
    metadata: msgspec.Raw = msgspec.Raw(b"{}")


class _PairRow(msgspec.Struct):
    prompt: list[dict[str, Any]]
    chosen: list[dict[str, Any]]
    rejected: list[dict[str, Any]]
    tools: msgspec.Raw
    quality_difference: float
    task_id: str
    metadata: msgspec.Raw


_ROW = msgspec.json.Decoder(_Row)
_Index = dict[str, list[_Entry]]
_ROUNDING = 1e-9


def make_dpo_pairs(workspace: Workspace, request: MakeDpoPairs) -> PairsResult:
    """Writes the pairs and returns the counts. Raises DataError if there is none."""
    output = workspace.output_file(request.output, what="output")
    names = [n for n in (request.input, request.chosen_from, request.rejected_from) if n]
    sources = [workspace.existing(name, what="rollouts") for name in names]
    check_output(output, sources)
    skipped: Counter[str] = Counter()
    indexes = [_index(source, skipped) for source in sources]
    # So far only whole rollouts were skipped.
    read = sum(len(e) for index in indexes for e in index.values()) + skipped.total()
    better, worse = indexes[0], indexes[-1]
    with atomic_output(output) as rows, RowReader() as reader:
        writer = _PairWriter(request, skipped, reader)
        for task_id in better:
            writer.write_task(task_id, better[task_id], worse.get(task_id, []), rows)
        if rows.num_rows == 0:
            raise _no_pairs(better, worse, skipped)
    result = PairsResult(
        output=workspace.shown(output),
        read=read,
        tasks=len(better),
        tasks_with_pairs=writer.tasks_with_pairs,
        pairs=len(writer.differences),
        skipped=dict(skipped),
        mean_difference=sum(writer.differences) / len(writer.differences),
    )
    write_manifest(
        output,
        operation="make_dpo_pairs",
        inputs=[file for source in sources for file in rollout_files(source)],
        request=request.model_dump(mode="json"),
        counts={"read": result.read, "pairs": result.pairs},
    )
    return result


class _PairWriter:
    """Turns the rollouts of one task after the other into pairs."""

    def __init__(self, request: MakeDpoPairs, skipped: Counter[str], reader: RowReader) -> None:
        self._request, self._skipped, self._reader = request, skipped, reader
        self.differences: list[float] = []
        self.tasks_with_pairs = 0

    def write_task(
        self, task_id: str, better: list[_Entry], worse: list[_Entry], rows: LineWriter
    ) -> None:
        """Writes the pairs of one task, those with the largest difference first."""
        written = 0
        for chosen, rejected in self._candidates(better, worse):
            if written == self._request.max_pairs_per_task:
                break
            row = self._pair(task_id, chosen, rejected)
            if row is not None:
                rows.write(row)
                self.differences.append(row.quality_difference)
                written += 1
        self.tasks_with_pairs += written > 0

    def _candidates(
        self, better: list[_Entry], worse: list[_Entry]
    ) -> Sequence[tuple[_Entry, _Entry]]:
        ranked = sorted(better, key=lambda entry: -entry.reward)
        lowest = sorted(worse, key=lambda entry: entry.reward)
        match self._request.strategy:
            case "best_worst":
                pairs = [(ranked[0], lowest[0])] if ranked and lowest else []
            case "adjacent":
                pairs = list(itertools.pairwise(ranked))
            case "all":
                pairs = list(itertools.product(ranked, lowest))
        # 0.5 - 0.4 is a little less than 0.1.
        least = self._request.min_difference - _ROUNDING
        enough = [p for p in pairs if p[0].reward - p[1].reward >= least]
        # An "all" of one file meets every pair twice; the wrong way round was never enough.
        num_ties = len(pairs) - len(enough)
        if num_ties and not enough:
            self._skipped["task whose rewards differ too little"] += 1
        return sorted(enough, key=lambda pair: pair[1].reward - pair[0].reward)

    def _pair(self, task_id: str, chosen: _Entry, rejected: _Entry) -> _PairRow | None:
        one, other = _read(chosen, self._reader), _read(rejected, self._reader)
        start = _first_difference(one.messages, other.messages)
        if start is None:
            self._skipped["pair of equal conversations"] += 1
            return None
        if not _both_answer(one.messages, other.messages, start):
            self._skipped["pair that parts at a tool's reply"] += 1
            return None
        end = start + 1 if self._request.cut == "first_turn" else None
        return _PairRow(
            prompt=one.messages[:start],
            chosen=one.messages[start:end],
            rejected=other.messages[start:end],
            tools=one.tools,
            quality_difference=chosen.reward - rejected.reward,
            task_id=task_id,
            metadata=one.metadata,
        )


def _index(source: Path, skipped: Counter[str]) -> _Index:
    """Returns where each task's rollouts are; only rewards are held in memory."""
    index: _Index = {}
    for rollout in read_rollouts(source):
        facts = rollout.facts
        if facts is None:
            skipped["not a rollout row"] += 1
        elif facts.reward is None:
            skipped["rollout without a reward"] += 1
        elif not facts.task_id:
            skipped["rollout without a task_id"] += 1
        elif facts.num_turns == 0:
            skipped["rollout without an assistant message"] += 1
        else:
            line = rollout.line
            is_own = rollout.layout is RolloutLayout.STILLROOM
            entry = _Entry(rollout.path, line.offset, line.num_bytes, facts.reward, is_own)
            index.setdefault(facts.task_id, []).append(entry)
    return index


def _read(entry: _Entry, reader: RowReader) -> _Row:
    data = reader.read(entry.path, entry.offset, entry.num_bytes)
    own = None if entry.is_own else own_row(data)
    return _ROW.decode(own or data)


def _first_difference(one: Sequence[Any], other: Sequence[Any]) -> int | None:
    """Returns the index of the first message that differs, ids of tool calls apart."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if without_ids(left) != without_ids(right):
            return index
    shorter = min(len(one), len(other))
    return shorter if len(one) != len(other) else None


def _both_answer(one: Sequence[Any], other: Sequence[Any], index: int) -> bool:
    """Whether both go on with an assistant's turn at `index`."""
    return all(len(m) > index and m[index]["role"] == "assistant" for m in (one, other))


def _no_pairs(better: _Index, worse: _Index, skipped: Counter[str]) -> DataError:
    shared = len(better.keys() & worse.keys())
    why = ", ".join(f"{count} × {reason}" for reason, count in skipped.items())
    return DataError(
        f"no pairs: {len(better)} tasks, {shared} of them on both sides"
        + (f" ({why})" if why else ""),
        "pairs need rollouts of the same tasks with different rewards: raise samples_per_prompt, "
        "or give a teacher's rollouts as chosen_from and a student's as rejected_from",
    )
