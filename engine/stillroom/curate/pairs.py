"""make_dpo_pairs: pairs rollouts of the same task with different rewards, for DPO training."""

import math
from array import array
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from pydantic import Field, model_validator

from stillroom.curate.facts import NO_TOOLS
from stillroom.curate.pair_candidates import (
    IndexedRollout,
    PairedRollout,
    PairReader,
    Strategy,
    TaskIndex,
    both_answer,
    first_difference,
    has_trained_turn,
    index_rollouts,
    ranked_pairs,
)
from stillroom.curate.project_tools import ProjectTools
from stillroom.curate.rows import ACCEPTED_ROWS, model_records
from stillroom.curate.sources import RowInputs, no_rows_error, open_inputs
from stillroom.data.row_notes import tools_notes
from stillroom.errors import DataError, noun_for
from stillroom.files import LineWriter
from stillroom.lineage import FileRecord, Recording
from stillroom.outputs import NewOutput, ReplacingRequest, new_output
from stillroom.settings import Workspace
from stillroom.types import OwnText


class MakeDpoPairs(ReplacingRequest):
    """The request for preference pairs of rollouts of the same task with different rewards."""

    input: Annotated[str | None, Field(description="Rollouts to compare by task")] = None
    chosen_from: Annotated[
        str | None, Field(description="Instead of input: source of chosen, e.g. teacher's")
    ] = None
    rejected_from: Annotated[
        str | None, Field(description="Source of rejected, e.g. student's")
    ] = None
    output: Annotated[str, Field(description="Pairs (.jsonl)")]
    strategy: Strategy = "best_worst"
    min_difference: Annotated[float, Field(gt=0, description="Least reward difference")] = 0.1
    max_pairs_per_task: Annotated[
        int | None, Field(ge=1, description="Keeps the largest differences")
    ] = None
    cut: Annotated[
        Literal["first_turn", "none"],
        Field(description="first_turn: only the first turn that differs; none: also all after it"),
    ] = "first_turn"
    system: Annotated[
        str | None, Field(description='Replaces the rows\' system messages; "" removes them')
    ] = None
    ray_address: str | None = None

    @model_validator(mode="after")
    def _validate_sources(self) -> "MakeDpoPairs":
        both = self.chosen_from is not None and self.rejected_from is not None
        neither = self.chosen_from is None and self.rejected_from is None
        if not ((self.input is not None and neither) or (self.input is None and both)):
            raise ValueError("give either input, or chosen_from and rejected_from")
        if both and self.strategy == "adjacent":
            raise ValueError("strategy adjacent needs input, not chosen_from and rejected_from")
        return self


class PairsResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of pairing: the counts of what was read, paired and skipped."""

    output: str
    read: int
    """The number of rows that were read, including those that could not take part in a pair."""
    tasks: int
    """The number of tasks with a rollout that could be the chosen one of a pair."""
    tasks_with_pairs: int
    pairs: int
    skipped: dict[OwnText, int]
    """The number of rollouts, tasks and pairs that were left out, by reason."""
    mean_difference: float
    notes: list[OwnText] = []
    """Notes on the pairs, such as tool calls without schemas."""


_TOLERANCE = 1e-9


def make_dpo_pairs(workspace: Workspace, request: MakeDpoPairs) -> PairsResult:
    """Writes the pairs and returns the counts. Raises DataError if there are no pairs."""
    with open_pairing(workspace, request) as pairing, Recording(pairing.files) as recording:
        skipped = pairing.tally.skipped
        pairing.set_indexes([index_rollouts(files, skipped) for files in pairing.file_groups])
        with PairReader() as reader:
            rows = pairing.output.rows
            writer = PairWriter(request, pairing.tally, reader, rows, tools=pairing.tools)
            for task_id, better in pairing.better.items():
                writer.write_task(task_id, better, pairing.worse.get(task_id, []))
        return pairing.finish(recording.records())


@contextmanager
def open_pairing(workspace: Workspace, request: MakeDpoPairs) -> Generator["Pairing"]:
    """Opens the inputs and the output of make_dpo_pairs.

    Raises InputError if the output is one of the inputs, or already has rollouts.
    """
    path = workspace.output_file(request.output, label="output")
    names = [n for n in (request.input, request.chosen_from, request.rejected_from) if n]
    with (
        open_inputs(workspace, names, outputs=[path]) as inputs,
        new_output(path, operation="make_dpo_pairs", overwrite=request.overwrite) as output,
    ):
        file_groups = [[file.path for file in inputs.by_name[name]] for name in names]
        yield Pairing(workspace, request, inputs, file_groups, output)


@dataclass(slots=True)
class PairTally:
    """Counts the pairs that were written, and what was skipped."""

    skipped: Counter[str] = field(default_factory=Counter[str])
    """The number of rollouts, tasks and pairs that were skipped, by reason."""
    differences: "array[float]" = field(default_factory=lambda: array("d"))
    """The reward of the chosen rollout minus that of the rejected one, for each pair written."""
    tasks_with_pairs: int = 0
    without_tools: int = 0
    """The pairs that call tools but have no schemas."""
    from_tools_file: int = 0
    """The pairs that took their schemas from the project's tools.py."""
    teachers: Counter[str] = field(default_factory=Counter[str])
    """The number of pairs with rollouts of other systems, by the model that answered."""

    def merge(self, other: "PairTally") -> None:
        """Adds the counts of another tally, which counted other tasks."""
        self.skipped.update(other.skipped)
        self.differences.extend(other.differences)
        self.tasks_with_pairs += other.tasks_with_pairs
        self.without_tools += other.without_tools
        self.from_tools_file += other.from_tools_file
        self.teachers.update(other.teachers)


class Pairing:
    """The files, tasks and counts of make_dpo_pairs, in one process or on a cluster."""

    def __init__(
        self,
        workspace: Workspace,
        request: MakeDpoPairs,
        inputs: RowInputs,
        file_groups: list[list[Path]],
        output: NewOutput,
    ) -> None:
        """`file_groups` has the files of `input`, or those of `chosen_from` and `rejected_from`."""
        self._workspace, self._request, self._inputs = workspace, request, inputs
        self.file_groups, self.output = file_groups, output
        self.tools = ProjectTools(output.path.parent, workspace.root)
        self.files = list(dict.fromkeys(file for files in file_groups for file in files))
        self.tally = PairTally()
        self.better: TaskIndex = {}
        self.worse: TaskIndex = {}
        self._num_read = 0

    def set_indexes(self, indexes: Sequence[TaskIndex]) -> None:
        """Sets the index of each file group; call it once, before the first pair is written."""
        skipped = self.tally.skipped
        for file in self._inputs.files:
            skipped.update(file.refused)
        # At this point `skipped` counts only rollouts, no tasks or pairs yet.
        num_indexed = sum(len(rollouts) for index in indexes for rollouts in index.values())
        self._num_read = num_indexed + skipped.total()
        self.better, self.worse = indexes[0], indexes[-1]
        if num_unpaired := len(self.worse.keys() - self.better.keys()):
            skipped["task only in rejected_from"] = num_unpaired

    def finish(self, input_records: Sequence[FileRecord]) -> PairsResult:
        """Writes the manifest, which names the input files, and returns the result.

        Raises DataError if there are no pairs.
        """
        rows = self.output.rows
        if not self._num_read:
            raise no_rows_error(", ".join(file.name for file in self._inputs.files[:3]))
        if rows.num_rows == 0:
            raise _no_pairs_error(self.better, self.worse, self.tally.skipped)
        result = PairsResult(
            output=self._workspace.shown(self.output.path),
            read=self._num_read,
            tasks=len(self.better),
            tasks_with_pairs=self.tally.tasks_with_pairs,
            pairs=rows.num_rows,
            skipped=dict(self.tally.skipped),
            mean_difference=math.fsum(self.tally.differences) / rows.num_rows,
            notes=[
                *self._inputs.notes,
                *self.tools.notes(self.tally.from_tools_file, rows.num_rows),
                *tools_notes(self.tally.without_tools, rows.num_rows),
            ],
        )
        counts = {"read": result.read, "pairs": result.pairs}
        inputs = [
            *self._inputs.records(input_records),
            *self.tools.records(self.tally.from_tools_file),
            *model_records(self.tally.teachers),
        ]
        self.output.record(
            inputs=inputs, request=self._request, counts=counts, left_out=result.skipped
        )
        return result


class PairWriter:
    """Writes the pairs, task by task, and counts them."""

    def __init__(
        self,
        request: MakeDpoPairs,
        tally: PairTally,
        reader: PairReader,
        rows: LineWriter,
        *,
        tools: ProjectTools,
    ) -> None:
        self._request, self._tally, self._reader, self._rows = request, tally, reader, rows
        self._tools = tools

    def write_task(
        self, task_id: str, better: list[IndexedRollout], worse: list[IndexedRollout]
    ) -> None:
        """Writes the pairs of one task, those with the largest difference in reward first.

        Pass the same list as `better` and `worse` to pair the rollouts with each other.
        """
        if not worse:
            self._tally.skipped["task only in chosen_from"] += 1
            return
        if better is worse and len(better) == 1:
            self._tally.skipped["task with a single rollout"] += 1
            return
        # In floating point, 0.5 - 0.4 is slightly less than 0.1; it must count as 0.1.
        min_difference = self._request.min_difference - _TOLERANCE
        candidates = ranked_pairs(
            better, worse, self._request.strategy, min_difference=min_difference
        )
        self._reader.begin_task(better if better is worse else [*better, *worse])
        num_candidates = written = 0
        for chosen, rejected in candidates:
            if written == self._request.max_pairs_per_task:
                break
            num_candidates += 1
            written += self._write_pair(task_id, chosen, rejected)
        self._tally.tasks_with_pairs += written > 0
        if not num_candidates:
            self._tally.skipped["task whose rewards differ too little"] += 1

    def _write_pair(self, task_id: str, chosen: IndexedRollout, rejected: IndexedRollout) -> bool:
        """Writes one pair, or counts why it is skipped. Returns whether it was written."""
        better = self._with_system(self._reader.read(chosen))
        worse = self._with_system(self._reader.read(rejected))
        start = first_difference(better.messages, worse.messages)
        if start is None:
            self._tally.skipped["pair of equal conversations"] += 1
            return False
        if not both_answer(better.messages, worse.messages, start):
            self._tally.skipped["pair that first differs in a tool's reply"] += 1
            return False
        end = start + 1 if self._request.cut == "first_turn" else None
        if not all(has_trained_turn(rollout.messages[start:end]) for rollout in (better, worse)):
            self._tally.skipped["pair in which an answer has only turns of weight 0"] += 1
            return False
        better = self._with_tools(better, worse, end)
        difference = chosen.reward - rejected.reward
        self._rows.write_raw(*_pair_row(better, worse, start, end, difference, task_id))
        self._tally.differences.append(difference)
        self._tally.teachers.update(filter(None, {better.recorded_model, worse.recorded_model}))
        return True

    def _with_tools(
        self, chosen: PairedRollout, rejected: PairedRollout, end: int | None
    ) -> PairedRollout:
        """Returns `chosen` with the schemas of tools.py if the pair calls tools without schemas."""
        if chosen.tools not in NO_TOOLS:
            return chosen
        called = _called_tools([*chosen.messages[:end], *rejected.messages[:end]])
        schemas = self._tools.schemas_for(called) if called else None
        if schemas is None:
            self._tally.without_tools += bool(called)
            return chosen
        self._tally.from_tools_file += 1
        return msgspec.structs.replace(chosen, tools=schemas)

    def _with_system(self, rollout: PairedRollout) -> PairedRollout:
        """Returns the rollout with its system message replaced by the request's.

        `""` removes it, None keeps it.
        """
        if (system := self._request.system) is None:
            return rollout
        others = [raw for raw in rollout.messages if msgspec.json.decode(raw)["role"] != "system"]
        first = [msgspec.json.encode({"role": "system", "content": system})] if system else []
        return msgspec.structs.replace(rollout, messages=[*map(msgspec.Raw, first), *others])


def _called_tools(messages: Iterable[msgspec.Raw]) -> set[str]:
    """Returns the names of the tools that the messages call."""
    decoded = map(msgspec.json.decode, messages)
    return {
        call["function"]["name"] for message in decoded for call in message.get("tool_calls") or ()
    }


def _pair_row(
    chosen: PairedRollout,
    rejected: PairedRollout,
    start: int,
    end: int | None,
    difference: float,
    task_id: str,
) -> tuple[bytes, ...]:
    """Returns the row of a pair as parts of a JSON text, which the caller joins.

    The two rollouts differ from message `start` on, and are cut before message `end`; None keeps
    all messages. The long fields are copied as bytes from the rollouts' lines.
    """
    short_fields = {
        "quality_difference": difference,
        "task_id": task_id,
        "chosen_id": chosen.name,
        "rejected_id": rejected.name,
    }
    return (
        b'{"prompt":[',
        b",".join(chosen.messages[:start]),
        b'],"chosen":[',
        b",".join(chosen.messages[start:end]),
        b'],"rejected":[',
        b",".join(rejected.messages[start:end]),
        b'],"tools":',
        chosen.tools,
        b',"metadata":',
        chosen.metadata,
        b",",
        msgspec.json.encode(short_fields)[1:],
    )


def _no_pairs_error(better: TaskIndex, worse: TaskIndex, skipped: Counter[str]) -> DataError:
    """Returns the error for rollouts from which no pair can be made."""
    tasks = f"{len(better)} {noun_for(len(better), 'task')}"
    if better is not worse:
        shared = len(better.keys() & worse.keys())
        tasks += f" of chosen_from, {shared} of them also in rejected_from"
    reasons = ", ".join(f"{reason}: {count}" for reason, count in skipped.items())
    return DataError(
        f"no pairs can be made from {tasks}" + (f" ({reasons})" if reasons else ""),
        ACCEPTED_ROWS
        if set(skipped) == {"not a rollout row"}
        else "pairs need rollouts of the same task with different rewards: score those without a "
        "reward (score_rollouts), generate more of each prompt (samples_per_prompt), lower "
        "min_difference, or give a teacher's rollouts as chosen_from and a student's as "
        "rejected_from",
    )
