"""convert_rollouts: turns rollouts into supervised rows for training."""

from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
from pydantic import Field, model_validator

from stillroom.curate.facts import NO_TOOLS, NULL, RolloutParts, RowFacts
from stillroom.curate.rewriting import AnswerRewriter, Unwritten, open_rewriter
from stillroom.curate.rows import ACCEPTED_ROWS, CuratedRow, foreign_teachers, read_curated_rows
from stillroom.curate.sources import RowInputs, open_inputs
from stillroom.data.instruction import UNINSTRUCTED, Instruction, removed_system
from stillroom.data.row_names import row_hash
from stillroom.data.row_notes import has_later_system, later_system_notes, tools_notes
from stillroom.errors import DataError, InputError
from stillroom.files import Buffer, LineWriter
from stillroom.lineage import FileRecord, Recording
from stillroom.outputs import NewOutput, ReplacingRequest, new_output
from stillroom.rollout.sources import SourceFile
from stillroom.settings import Workspace
from stillroom.types import Message, OthersText, OwnText

MAX_EXAMPLES = 5
_MAX_SOURCES = 20
_NO_ROLLOUT = "not a rollout row"
_OTHER_ROLLOUTS = (
    "give include_failed to convert rollouts without success too; score_rollouts judges rollouts "
    "again, and generate_rollouts makes more"
)
_BEYOND_PROMPT, _BEYOND_SHARE = "beyond own_per_prompt", "beyond own_share"
RowPlaces = dict[tuple[Path, int], str]
"""Reasons by the file and the offset of a row."""


class ConvertRollouts(ReplacingRequest):
    """Ask for supervised rows from rollouts: messages, tools, metadata, reward."""

    input: Annotated[
        str | tuple[str, ...],
        Field(description="Rollouts or logs"),
    ]
    output: Annotated[str, Field(description="Supervised rows (.jsonl)")]
    include_failed: Annotated[bool, Field(description="Also convert unsuccessful ones")] = False
    own: Annotated[str | None, Field(description="Student's right rollouts to mix in")] = None
    own_share: Annotated[float, Field(gt=0, lt=1, description="Most of all rows")] = 0.5
    own_per_prompt: Annotated[int, Field(ge=1)] = 1
    system: Annotated[
        str | None, Field(description='System message instead of that read; "": none')
    ] = None
    rewrite: Annotated[
        str | None,
        Field(description="File with @tool rewrite(answer)"),
    ] = None
    ray_address: str | None = None

    @model_validator(mode="after")
    def _rewrites_here(self) -> "ConvertRollouts":
        if self.rewrite is not None and self.ray_address is not None:
            raise ValueError("rewrite runs in one process: leave ray_address out")
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

    They count because their reward is at least 0.5 or, without a reward, because they end with a
    complete answer.
    """
    problems: list[OthersText]
    """The first lines (at most 5) that are not rollouts, each with its `file:line`."""
    notes: list[OwnText] = []
    """Notes on converted rows that teach something else than they seem to."""


def convert_rollouts(workspace: Workspace, request: ConvertRollouts) -> ConvertResult:
    """Writes the supervised rows and returns the counts.

    Raises DataError if no row could be converted.
    """
    with open_conversion(workspace, request) as opened:
        file = workspace.existing(request.rewrite, label="rewrite") if request.rewrite else None
        files = [source.path for source in (*opened.sources, *opened.own)]
        with (
            Recording([*files, *([file] if file else [])]) as recording,
            open_rewriter(file) as rewriter,
        ):
            conversion = Conversion(opened.output.rows, request, rewriter)
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


@contextmanager
def open_conversion(workspace: Workspace, request: ConvertRollouts) -> Generator[OpenedConversion]:
    """Opens the files of a conversion.

    Raises InputError for options of own rollouts without them, for a file that is both an input and
    own, and for an output that must not be written.
    """
    names = [request.input] if isinstance(request.input, str) else list(request.input)
    if request.own is None:
        # By value: a run's recorded request names every option.
        for name in ("own_share", "own_per_prompt"):
            if getattr(request, name) != ConvertRollouts.model_fields[name].default:
                raise InputError(f"{name} needs own", "name the student's own rollouts as own")
    own_names = [] if request.own is None else [request.own]
    output = workspace.output_file(request.output, label="output")
    with open_inputs(workspace, [*names, *own_names], outputs=[output]) as inputs:
        sources = RowInputs({name: inputs.by_name[name] for name in names}).files
        own = [file for name in own_names for file in inputs.by_name[name]]
        paths = {source.path.resolve() for source in sources}
        if shared := [source.name for source in own if source.path.resolve() in paths]:
            raise InputError(f"{shared[0]} is both input and own", "name it once")
        writing = new_output(output, operation="convert_rollouts", overwrite=request.overwrite)
        with writing as new:
            yield OpenedConversion(sources, own, inputs, new)


@dataclass(slots=True)
class ConversionTally:
    """Counts what is converted and left out."""

    sources: list[SourceCount] = field(default_factory=list[SourceCount])
    problems: list[str] = field(default_factory=list[str])
    success_derived: int = 0
    without_tools: int = 0
    """The converted rows that call tools but have no schemas."""
    later_system: int = 0
    """The converted rows with a system message after their first message."""
    teachers: Counter[str] = field(default_factory=Counter[str])
    """The number of converted rows by the model that another system says answered."""

    def take(self, other: "ConversionTally") -> None:
        """Adds the counts of further files to these."""
        self.sources += other.sources
        self.problems += other.problems[: MAX_EXAMPLES - len(self.problems)]
        self.success_derived += other.success_derived
        self.without_tools += other.without_tools
        self.later_system += other.later_system
        self.teachers.update(other.teachers)


class Conversion:
    """Converts one file after the other, and counts what is converted and left out."""

    def __init__(
        self, rows: LineWriter, request: ConvertRollouts, rewriter: AnswerRewriter | None = None
    ) -> None:
        self._rows, self.include_failed = rows, request.include_failed
        self._rewriter = rewriter
        self._instruction = Instruction(request.system)
        self.tally = ConversionTally()

    def add_own(self, sources: Sequence[SourceFile], request: ConvertRollouts) -> None:
        """Adds the student's own right rollouts, up to their share of all rows."""
        if not sources or not self._rows.num_rows:
            return
        most = int(self._rows.num_rows * request.own_share / (1 - request.own_share) + 1e-9)
        paths = [source.path for source in sources]
        left_out = _own_left_out(paths, most=most, per_prompt=request.own_per_prompt)
        self.include_failed = False
        for source in sources:
            self.convert(source, left_out)

    def convert(self, source: SourceFile, unwanted: RowPlaces | None = None) -> None:
        """Writes the supervised rows of one file and adds its counts to the tally.

        `unwanted` are right rollouts that are left out, with the reason.
        """
        left_out = Counter(source.refused)
        problems = self.tally.problems
        problems += source.problems[: MAX_EXAMPLES - len(problems)]
        before = self._rows.num_rows
        for rollout in read_curated_rows(source.path, with_parts=True):
            place = (rollout.path, rollout.line.offset)
            reason = (unwanted or {}).get(place) or self._write(rollout)
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
        facts, parts = rollout.facts, rollout.parts
        if facts is None or parts is None:
            self._note(rollout, rollout.problem)
            return _NO_ROLLOUT
        reason = reason_to_leave_out(facts, include_failed=self.include_failed)
        if reason is not None:
            return reason
        original = None
        if self._rewriter is not None:
            rewritten = self._rewriter.rewrite(parts)
            if isinstance(rewritten, Unwritten):
                if rewritten.error is not None:
                    self._note(rollout, rewritten.error)
                return rewritten.reason
            parts, original = rewritten.parts, rewritten.original_sha256
        row = supervised_row(facts, parts, self._instruction, original_answer=original)
        self._rows.write_raw(*row, source=rollout.line.source)
        self.tally.success_derived += facts.is_success_derived and facts.is_success
        self.tally.without_tools += parts.tools in NO_TOOLS and bool(facts.tools_used)
        if self._instruction.system is None:  # else all system messages were replaced
            self.tally.later_system += has_later_system(one.role for one in facts.messages)
        if rollout.translated is not None and (teacher := rollout.foreign_teacher):
            self.tally.teachers[teacher] += 1
        return None

    def _note(self, rollout: CuratedRow, problem: str | None) -> None:
        if len(self.tally.problems) < MAX_EXAMPLES:
            self.tally.problems.append(f"{rollout.where}: {problem}")

    def finish(
        self,
        workspace: Workspace,
        request: ConvertRollouts,
        opened: OpenedConversion,
        read: Sequence[FileRecord],
    ) -> ConvertResult:
        """Writes the manifest of the output and returns all counts; `read` are the files read.

        Raises DataError if no row could be converted.
        """
        output, whole = opened.output, _summed("all", self.tally.sources)
        if output.rows.num_rows == 0:
            raise _nothing_converted(opened.sources, whole, self.tally.problems)
        counts = {"read": whole.read, "converted": whole.converted}
        inputs = [*opened.inputs.records(read), *foreign_teachers(self.tally.teachers)]
        output.record(inputs=inputs, request=request, counts=counts)
        shown, rest = self.tally.sources[:_MAX_SOURCES], self.tally.sources[_MAX_SOURCES:]
        return ConvertResult(
            output=workspace.shown(output.path),
            read=whole.read,
            converted=whole.converted,
            left_out=whole.left_out,
            sources=[*shown, _summed(f"{len(rest)} more files", rest)] if rest else shown,
            success_derived=self.tally.success_derived,
            problems=self.tally.problems,
            notes=[
                *opened.inputs.notes,
                *tools_notes(self.tally.without_tools, whole.converted),
                *later_system_notes(self.tally.later_system, whole.converted),
            ],
        )


def _nothing_converted(
    sources: Sequence[SourceFile], whole: SourceCount, problems: Sequence[str]
) -> DataError:
    why = ", ".join(f"{count} {reason}" for reason, count in whole.left_out.items())
    example = f"; the first: {problems[0]}" if problems else ""
    where = ", ".join(s.name for s in sources[:3]) + (", …" if len(sources) > 3 else "")
    return DataError(
        f"none of the {whole.read} rows in {where} can be converted ({why}){example}",
        ACCEPTED_ROWS if set(whole.left_out) <= {_NO_ROLLOUT} else _OTHER_ROLLOUTS,
    )


def supervised_row(
    facts: RowFacts,
    parts: RolloutParts,
    instruction: Instruction = UNINSTRUCTED,
    *,
    original_answer: str | None = None,
) -> tuple[Buffer, ...]:
    """Returns the supervised row of a rollout as JSON in parts, to be joined.

    The long parts are copied as bytes from the rollout's line; they are not decoded and encoded,
    unless the row is to have another system message. The row then says which one was removed.
    `original_answer` is the hash of the answer that a rewritten row had.
    """
    messages, removed = parts.messages, b""
    if not instruction.is_empty:
        read: list[Message] = msgspec.json.decode(parts.messages)
        written = instruction.put_before(read)
        if written != read:
            messages = msgspec.json.encode(written)
            if (was_removed := removed_system(read)) is not None:
                removed = b',"removed_system":' + msgspec.json.encode(was_removed)
    return (
        b'{"messages":',
        messages,
        b',"tools":',
        b"[]" if parts.tools == NULL else parts.tools,
        b',"metadata":',
        b"{}" if parts.metadata == NULL else parts.metadata,
        b',"reward":',
        parts.reward,
        b',"task_id":',
        msgspec.json.encode(facts.task_id),
        b',"rollout_id":',
        msgspec.json.encode(facts.id or None),
        removed,
        b',"rewritten_from":"%s"' % original_answer.encode() if original_answer else b"",
        b"}",
    )


def _summed(name: str, counts: Sequence[SourceCount]) -> SourceCount:
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
        return "ended by an infrastructure failure"
    if facts.num_turns == 0:
        return "no assistant message"
    return None if include_failed or facts.is_success else "no success"


def _own_left_out(files: Iterable[Path], *, most: int, per_prompt: int) -> RowPlaces:
    """Returns the right rollouts that are one too many, with the reason.

    At most `most` are not among them, and at most `per_prompt` of each prompt. Which ones follows
    from the rows' contents alone: all prompts have the same chance, and the same rows give the same
    choice in any order.
    """
    right = sorted(
        (row_hash(row.line.data), row.path, row.line.offset, row.facts.task_id)
        for file in files
        for row in read_curated_rows(file)
        if row.facts is not None and row.facts.is_success and row.facts.error is None
    )
    num_taken, left_out, of_prompt = 0, RowPlaces(), Counter[str | None]()
    for _, path, offset, task_id in right:
        if of_prompt[task_id] == per_prompt:
            left_out[path, offset] = _BEYOND_PROMPT
        elif num_taken >= most:
            left_out[path, offset] = _BEYOND_SHARE
        else:
            of_prompt[task_id] += 1
            num_taken += 1
    return left_out
