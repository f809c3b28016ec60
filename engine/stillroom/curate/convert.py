"""convert_rollouts: turns rollouts into supervised rows for training."""

import math
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
from pydantic import Field, model_validator

from stillroom.curate.facts import NO_TOOLS, NULL, RawFields, RowFacts
from stillroom.curate.project_tools import ProjectTools
from stillroom.curate.rewriting import (
    REWRITE_ERRORS,
    REWRITE_FIX,
    AnswerRewriter,
    SkippedRewrite,
    open_rewriter,
)
from stillroom.curate.rows import ACCEPTED_ROWS, CuratedRow, model_records, read_curated_rows
from stillroom.curate.sources import RowInputs, no_rows_error, open_inputs
from stillroom.data.instruction import UNINSTRUCTED, Instruction, removed_system
from stillroom.data.row_names import row_hash
from stillroom.data.row_notes import (
    has_later_system,
    later_system_notes,
    summed_reward_notes,
    tools_notes,
    unjudged_notes,
)
from stillroom.errors import DataError, InputError
from stillroom.files import Buffer, LineWriter
from stillroom.lineage import FileRecord, Recording
from stillroom.outputs import NewOutput, ReplacingRequest, new_output
from stillroom.rollout.sources import SourceFile
from stillroom.settings import Workspace
from stillroom.types import Message, OthersText, OwnText, RowReason

MAX_EXAMPLES = 5
_MAX_SOURCES = 20
_NOT_A_ROLLOUT = "not a rollout row"
_MORE_ROLLOUTS_FIX = (
    "set include_failed to convert unsuccessful rollouts too, judge the rollouts again with "
    "score_rollouts, or make more with generate_rollouts"
)
_BEYOND_PROMPT, _BEYOND_SHARE = "beyond own_per_prompt", "beyond own_share"
LeftOutRows = dict[tuple[Path, int], str]
"""The reasons why rows are left out, by the file and offset of each row."""


class ConvertRollouts(ReplacingRequest):
    """The request to convert rollouts to supervised rows."""

    input: Annotated[
        str | tuple[str, ...],
        Field(description="Rollouts or logs"),
    ]
    output: Annotated[str, Field(description="Supervised rows (.jsonl)")]
    include_failed: Annotated[bool, Field(description="Also convert unsuccessful ones")] = False
    own: Annotated[str | None, Field(description="Student's successes to mix in")] = None
    own_share: Annotated[float, Field(gt=0, lt=1, description="Max share of rows")] = 0.5
    own_per_prompt: Annotated[int, Field(ge=1)] = 1
    system: Annotated[
        str | None, Field(description='Replaces the rows\' system messages; "" removes them')
    ] = None
    rewrite: Annotated[
        str | None,
        Field(description="File with @tool rewrite(answer)"),
    ] = None
    ray_address: str | None = None

    @model_validator(mode="after")
    def _validate_rewrite(self) -> "ConvertRollouts":
        if self.rewrite is not None and self.ray_address is not None:
            raise ValueError("rewrite does not run on Ray: leave ray_address out")
        return self


class SourceCount(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of one input file. Always read = converted + the sum of left_out."""

    source: str
    read: int
    converted: int
    left_out: dict[OwnText, int]


class ConvertResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a conversion. Always read = converted + the sum of left_out."""

    output: str
    read: int
    converted: int
    left_out: dict[OwnText, int]
    sources: list[SourceCount]
    """The counts per input file; those after the first 20 files are summed in one entry."""
    success_derived: int
    """The number of converted rows that count as a success without a `success` field.

    Their reward is at least 0.5, or they have no reward and end with a complete answer.
    """
    problems: list[OthersText]
    """The first lines (at most 5) that are not rollouts, each with its `file:line`."""
    notes: list[OwnText] = []
    """Notes on the rows: missing rewards or tool schemas, and system messages after the first."""


def convert_rollouts(workspace: Workspace, request: ConvertRollouts) -> ConvertResult:
    """Writes the supervised rows and returns the counts.

    Raises DataError if no row could be converted.
    """
    with open_conversion(workspace, request) as opened:
        rewrite = workspace.existing(request.rewrite, label="rewrite") if request.rewrite else None
        files = [source.path for source in (*opened.sources, *opened.own)]
        with (
            Recording([*files, *([rewrite] if rewrite else [])]) as recording,
            open_rewriter(rewrite) as rewriter,
        ):
            conversion = Conversion(
                opened.output.rows, request, tools=opened.tools, rewriter=rewriter
            )
            for source in opened.sources:
                conversion.convert(source)
            conversion.add_own(opened.own, request)
            return conversion.finish(workspace, request, opened, recording.records())


@dataclass(frozen=True, slots=True)
class OpenedConversion:
    """The inputs and the output of a conversion, in one process as well as on a cluster."""

    sources: list[SourceFile]
    own: list[SourceFile]
    """The files of the student's own rollouts; none if the request names none."""
    inputs: RowInputs
    output: NewOutput
    tools: ProjectTools


@contextmanager
def open_conversion(workspace: Workspace, request: ConvertRollouts) -> Generator[OpenedConversion]:
    """Opens the inputs and the output of convert_rollouts.

    Raises InputError for own_share or own_per_prompt without own, for a file that is in both input
    and own, and for an output that must not be replaced.
    """
    names = [request.input] if isinstance(request.input, str) else list(request.input)
    if request.own is None:
        # Compares values: the recorded request of a run sets every field.
        for name in ("own_share", "own_per_prompt"):
            if getattr(request, name) != ConvertRollouts.model_fields[name].default:
                raise InputError(
                    f"{name} requires own",
                    f"set own to the student's rollouts, or leave {name} out",
                )
    own_names = [] if request.own is None else [request.own]
    output = workspace.output_file(request.output, label="output")
    with open_inputs(workspace, [*names, *own_names], outputs=[output]) as inputs:
        sources = RowInputs({name: inputs.by_name[name] for name in names}).files
        own = [file for name in own_names for file in inputs.by_name[name]]
        paths = {source.path.resolve() for source in sources}
        if shared := [source.name for source in own if source.path.resolve() in paths]:
            raise InputError(
                f"{shared[0]} is given both as input and as own (the student's rollouts)",
                "remove it from one of them",
            )
        writing = new_output(output, operation="convert_rollouts", overwrite=request.overwrite)
        with writing as new:
            tools = ProjectTools(output.parent, workspace.root)
            yield OpenedConversion(sources, own, inputs, new, tools)


@dataclass(slots=True)
class ConversionTally:
    """Counts the rows that are converted and left out."""

    sources: list[SourceCount] = field(default_factory=list[SourceCount])
    problems: list[str] = field(default_factory=list[str])
    success_derived: int = 0
    smallest_reward: float = math.inf
    """The smallest reward that made a converted row a success, and the largest."""
    largest_reward: float = -math.inf
    unjudged: int = 0
    """The converted rows without a reward or success."""
    without_tools: int = 0
    """The converted rows that call tools but have no schemas."""
    from_tools_file: int = 0
    """The converted rows that took their schemas from the project's tools.py."""
    later_system: int = 0
    """The converted rows with a system message after their first message."""
    teachers: Counter[str] = field(default_factory=Counter[str])
    """The number of converted rows from other systems, by the model that answered."""

    def add_success(self, facts: RowFacts) -> None:
        """Counts a converted row as one that has `success` or not."""
        self.unjudged += facts.success is None and facts.reward is None
        if facts.success is None and facts.is_success:
            self.success_derived += 1
            if facts.reward is not None:
                self.smallest_reward = min(self.smallest_reward, facts.reward)
                self.largest_reward = max(self.largest_reward, facts.reward)

    def merge(self, other: "ConversionTally") -> None:
        """Adds the counts of another tally, which counted other files."""
        self.sources += other.sources
        self.problems += other.problems[: MAX_EXAMPLES - len(self.problems)]
        self.success_derived += other.success_derived
        self.smallest_reward = min(self.smallest_reward, other.smallest_reward)
        self.largest_reward = max(self.largest_reward, other.largest_reward)
        self.unjudged += other.unjudged
        self.without_tools += other.without_tools
        self.from_tools_file += other.from_tools_file
        self.later_system += other.later_system
        self.teachers.update(other.teachers)


class Conversion:
    """Converts files, one at a time, and counts the rows that are converted and left out."""

    def __init__(
        self,
        rows: LineWriter,
        request: ConvertRollouts,
        *,
        tools: ProjectTools,
        rewriter: AnswerRewriter | None = None,
    ) -> None:
        self._rows, self.include_failed = rows, request.include_failed
        self._tools, self._rewriter = tools, rewriter
        self._instruction = Instruction(request.system)
        self.tally = ConversionTally()

    def add_own(self, sources: Sequence[SourceFile], request: ConvertRollouts) -> None:
        """Adds the student's own successful rollouts, up to their share of all rows."""
        if not sources or not self._rows.num_rows:
            return
        max_rows = int(self._rows.num_rows * request.own_share / (1 - request.own_share) + 1e-9)
        paths = [source.path for source in sources]
        left_out = _surplus_own_rollouts(paths, max_rows, per_prompt=request.own_per_prompt)
        self.include_failed = False
        for source in sources:
            self.convert(source, left_out)

    def convert(self, source: SourceFile, surplus: LeftOutRows | None = None) -> None:
        """Writes the supervised rows of one file and adds its counts to the tally.

        `surplus` has the rows to leave out although they could be converted.
        """
        left_out = Counter(source.refused)
        problems = self.tally.problems
        problems += source.problems[: MAX_EXAMPLES - len(problems)]
        before = self._rows.num_rows
        for rollout in read_curated_rows(source.path, with_raw_fields=True):
            key = (rollout.path, rollout.line.offset)
            reason = (surplus or {}).get(key) or self._write(rollout)
            if reason is not None:
                left_out[reason] += 1
        converted = self._rows.num_rows - before
        self.tally.sources.append(
            SourceCount(
                source=source.name,
                read=converted + left_out.total(),
                converted=converted,
                left_out=dict(left_out),
            )
        )

    def _write(self, rollout: CuratedRow) -> str | None:
        """Writes the supervised row of a rollout, or returns the reason why it is left out."""
        facts, raw_fields = rollout.facts, rollout.raw_fields
        if facts is None or raw_fields is None:
            self._add_problem(rollout, rollout.problem)
            return _NOT_A_ROLLOUT
        reason = reason_to_leave_out(facts, include_failed=self.include_failed)
        if reason is not None:
            return reason
        original = None
        if self._rewriter is not None:
            rewritten = self._rewriter.rewrite(raw_fields)
            if isinstance(rewritten, SkippedRewrite):
                if rewritten.error is not None:
                    self._add_problem(rollout, rewritten.error)
                return rewritten.reason
            raw_fields, original = rewritten.raw_fields, rewritten.original_sha256
        raw_fields = self._with_tools(facts, raw_fields)
        row = supervised_row(facts, raw_fields, self._instruction, original_sha256=original)
        self._rows.write_raw(*row, source=rollout.line.source)
        self.tally.add_success(facts)
        if self._instruction.system is None:  # else all system messages were replaced
            self.tally.later_system += has_later_system(message.role for message in facts.messages)
        if rollout.translated is not None and (teacher := rollout.recorded_model):
            self.tally.teachers[teacher] += 1
        return None

    def _with_tools(self, facts: RowFacts, raw_fields: RawFields) -> RawFields:
        """Returns the fields, with the schemas of tools.py for calls of tools without schemas."""
        if raw_fields.tools not in NO_TOOLS or not (called := facts.tools_used):
            return raw_fields
        if (schemas := self._tools.schemas_for(called)) is None:
            self.tally.without_tools += 1
            return raw_fields
        self.tally.from_tools_file += 1
        return msgspec.structs.replace(raw_fields, tools=schemas)

    def _add_problem(self, rollout: CuratedRow, problem: str | None) -> None:
        if len(self.tally.problems) < MAX_EXAMPLES:
            self.tally.problems.append(f"{rollout.where}: {problem}")

    def finish(
        self,
        workspace: Workspace,
        request: ConvertRollouts,
        opened: OpenedConversion,
        input_records: Sequence[FileRecord],
    ) -> ConvertResult:
        """Writes the manifest, which names the input files, and returns the result.

        Raises DataError if no row could be converted.
        """
        output, total = opened.output, _sum_counts("all", self.tally.sources)
        if output.rows.num_rows == 0:
            raise _nothing_converted_error(opened.sources, total, self.tally.problems)
        counts = {"read": total.read, "converted": total.converted}
        inputs = [
            *opened.inputs.records(input_records),
            *opened.tools.records(self.tally.from_tools_file),
            *model_records(self.tally.teachers),
        ]
        output.record(inputs=inputs, request=request, counts=counts, left_out=total.left_out)
        shown, more = self.tally.sources[:_MAX_SOURCES], self.tally.sources[_MAX_SOURCES:]
        return ConvertResult(
            output=workspace.shown(output.path),
            read=total.read,
            converted=total.converted,
            left_out=total.left_out,
            sources=[*shown, _sum_counts(f"{len(more)} more files", more)] if more else shown,
            success_derived=self.tally.success_derived,
            problems=self.tally.problems,
            notes=[
                *opened.inputs.notes,
                *unjudged_notes(self.tally.unjudged, total.converted),
                *summed_reward_notes(self.tally.smallest_reward, self.tally.largest_reward),
                *opened.tools.notes(self.tally.from_tools_file, total.converted),
                *tools_notes(self.tally.without_tools, total.converted),
                *later_system_notes(self.tally.later_system, total.converted),
            ],
        )


def _nothing_converted_error(
    sources: Sequence[SourceFile], total: SourceCount, problems: Sequence[str]
) -> DataError:
    """Returns the error for files without a row that can be converted."""
    files = ", ".join(s.name for s in sources[:3]) + (", …" if len(sources) > 3 else "")
    if not total.read:
        return no_rows_error(files)
    reasons = ", ".join(f"{reason}: {count}" for reason, count in total.left_out.items())
    example = f"; the first problem: {problems[0]}" if problems else ""
    return DataError(
        f"none of the {total.read} rows in {files} can be converted"
        + (f" ({reasons})" if reasons else "")
        + example,
        ACCEPTED_ROWS
        if set(total.left_out) <= {_NOT_A_ROLLOUT}
        else REWRITE_FIX
        if total.left_out.keys() & REWRITE_ERRORS
        else _MORE_ROLLOUTS_FIX,
    )


def supervised_row(
    facts: RowFacts,
    raw_fields: RawFields,
    instruction: Instruction = UNINSTRUCTED,
    *,
    original_sha256: str | None = None,
) -> tuple[Buffer, ...]:
    """Returns the supervised row of a rollout as parts of a JSON text, which the caller joins.

    The long parts are copied as bytes from the rollout's line. Only a new system message requires
    the messages to be decoded; the row then records the one that was removed. `original_sha256` is
    the hash of a rewritten row's original answer.
    """
    messages, removed = raw_fields.messages, b""
    if not instruction.is_empty:
        original: list[Message] = msgspec.json.decode(raw_fields.messages)
        instructed = instruction.apply_to(original)
        if instructed != original:
            messages = msgspec.json.encode(instructed)
            if (system := removed_system(original)) is not None:
                removed = b',"removed_system":' + msgspec.json.encode(system)
    return (
        b'{"messages":',
        messages,
        b',"tools":',
        b"[]" if raw_fields.tools == NULL else raw_fields.tools,
        b',"metadata":',
        b"{}" if raw_fields.metadata == NULL else raw_fields.metadata,
        b',"reward":',
        raw_fields.reward,
        b',"task_id":',
        msgspec.json.encode(facts.task_id),
        b',"rollout_id":',
        msgspec.json.encode(facts.id or None),
        removed,
        b',"rewritten_from":"%s"' % original_sha256.encode() if original_sha256 else b"",
        b"}",
    )


def _sum_counts(name: str, counts: Sequence[SourceCount]) -> SourceCount:
    """Returns the sum of the counts of several files, under a new name."""
    left_out: Counter[str] = Counter()
    for count in counts:
        left_out.update(count.left_out)
    return SourceCount(
        source=name,
        read=sum(count.read for count in counts),
        converted=sum(count.converted for count in counts),
        left_out=dict(left_out),
    )


def reason_to_leave_out(facts: RowFacts, *, include_failed: bool) -> str | None:
    """Returns the reason why a rollout is left out; None if it is converted."""
    if facts.error is not None:
        return RowReason.FAILED.value
    if facts.num_turns == 0:
        return "no assistant message"
    return None if include_failed else facts.failure


def _surplus_own_rollouts(files: Iterable[Path], max_rows: int, *, per_prompt: int) -> LeftOutRows:
    """Returns the successful rollouts beyond `max_rows`, and beyond `per_prompt` of each prompt.

    The choice depends only on the contents of the rows, not on their order, and favours no prompt.
    """
    successes = sorted(
        (row_hash(row.line.data), row.path, row.line.offset, row.facts.task_id)
        for file in files
        for row in read_curated_rows(file)
        if row.facts is not None and row.facts.is_success and row.facts.error is None
    )
    num_taken, left_out, taken_by_prompt = 0, LeftOutRows(), Counter[str | None]()
    for _, path, offset, task_id in successes:
        if taken_by_prompt[task_id] == per_prompt:
            left_out[path, offset] = _BEYOND_PROMPT
        elif num_taken >= max_rows:
            left_out[path, offset] = _BEYOND_SHARE
        else:
            taken_by_prompt[task_id] += 1
            num_taken += 1
    return left_out
