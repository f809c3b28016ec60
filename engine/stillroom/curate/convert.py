"""Rollouts become supervised rows."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from stillroom.curate.rows import RolloutLine, check_output, read_rollouts
from stillroom.data.row_files import rollout_files
from stillroom.errors import DataError
from stillroom.files import atomic_output
from stillroom.lineage import write_manifest
from stillroom.settings import Workspace

MAX_EXAMPLES = 5


class ConvertRollouts(BaseModel):
    """Ask for supervised rows from rollouts: messages, tools, metadata, reward."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input: Annotated[str, Field(description="Rollouts file or folder; also of rnow or NeMo Gym")]
    output: Annotated[str, Field(description="Supervised rows (.jsonl); replaced when complete")]
    include_failed: Annotated[bool, Field(description="Keep rollouts that were no success too")] = (
        False
    )


class ConvertResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a conversion came to. read = converted + the sum of left_out, always."""

    output: str
    read: int
    converted: int
    left_out: dict[str, int]
    success_derived: int
    """Rows without `success`: a reward from 0.5, else a complete final answer, was taken as one."""
    problems: list[str]
    """The first lines that are no rollouts, with file:line."""


class _Passed(msgspec.Struct):
    """The fields that go into a supervised row, byte for byte."""

    messages: msgspec.Raw
    tools: msgspec.Raw = msgspec.Raw(b"[]")
    metadata: msgspec.Raw = msgspec.Raw(b"{}")
    reward: msgspec.Raw = msgspec.Raw(b"null")
    task_id: msgspec.Raw = msgspec.Raw(b"null")


def convert_rollouts(workspace: Workspace, request: ConvertRollouts) -> ConvertResult:
    """Writes the rows and returns the counts. Raises DataError if nothing was converted."""
    source = workspace.existing(request.input, what="input")
    output = workspace.output_file(request.output, what="output")
    check_output(output, [source])
    left_out: Counter[str] = Counter()
    problems: list[str] = []
    read = derived = 0
    decoder = msgspec.json.Decoder(_Passed)
    with atomic_output(output) as rows:
        for rollout in read_rollouts(source):
            read += 1
            reason = _reason_to_leave_out(rollout, include_failed=request.include_failed)
            if reason is not None:
                left_out[reason] += 1
                if rollout.problem and len(problems) < MAX_EXAMPLES:
                    problems.append(f"{rollout.where}: {rollout.problem}")
                continue
            derived += _is_derived(rollout)
            rows.write(decoder.decode(rollout.own))
        if rows.num_rows == 0:
            raise _nothing_converted(source, read, left_out, problems)
        converted = rows.num_rows
    result = ConvertResult(
        output=workspace.shown(output),
        read=read,
        converted=converted,
        left_out=dict(left_out),
        success_derived=derived,
        problems=problems,
    )
    write_manifest(
        output,
        operation="convert_rollouts",
        inputs=rollout_files(source),
        request=request.model_dump(mode="json"),
        counts={"read": read, "converted": converted},
    )
    return result


def _is_derived(rollout: RolloutLine) -> bool:
    facts = rollout.facts
    return facts is not None and facts.is_success_derived and facts.is_success


def _reason_to_leave_out(rollout: RolloutLine, *, include_failed: bool) -> str | None:
    facts = rollout.facts
    if facts is None:
        return "not a rollout row"
    if facts.error is not None:
        return "ended by an infrastructure failure"
    if facts.num_turns == 0:
        return "no assistant message"
    return None if include_failed or facts.is_success else "no success"


def _nothing_converted(
    source: Path, read: int, left_out: Counter[str], problems: list[str]
) -> DataError:
    why = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
    example = f"; the first: {problems[0]}" if problems else ""
    return DataError(
        f"none of the {read} rows in {source} can be converted ({why}){example}",
        "give a file that generate_rollouts wrote; with include_failed also those without success",
    )
