"""Reads the rollouts of one file of another system in place, as an import would write them."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from stillroom.importing.conversations.collector import RowCollector
from stillroom.importing.conversations.join import joined_rows
from stillroom.importing.conversations.rollouts import RolloutBuilder
from stillroom.importing.output.feedback import settled_feedback
from stillroom.importing.output.writing import RolloutSide, RolloutWriter
from stillroom.importing.packed import unpacked_files
from stillroom.importing.redaction import Redaction
from stillroom.importing.sources import format_of, unrecognised
from stillroom.importing.spill import Spill
from stillroom.importing.tally import ImportTally, RefusedRow
from stillroom.settings import Workspace


@dataclass(frozen=True, slots=True)
class ForeignRollout:
    """One rollout of another system's file."""

    source: str
    """The place of its last source row as users read it, such as `logs/a.jsonl:12`."""
    data: bytes
    """The row as JSON in the layout of generate_rollouts, as import_rollouts would write it."""


def open_foreign_rollouts(
    workspace: Workspace, path: Path
) -> Iterator[ForeignRollout | RefusedRow]:
    """Yields the rollouts of a file of any format that import_rollouts knows, and writes nothing.

    The rows are those that an import of this file alone would write: calls are joined to
    conversations, ids follow from places, and secrets and personal data are replaced by marks. So
    the whole file is read first (most of it waits in a temporary file), and the rows that no
    rollout can be made of are yielded before the first rollout.
    Raises InputError for a file that no format recognises, or that must not be read.
    """
    redaction = Redaction(workspace.redactor(), keep_secrets=False, keep_personal=False)
    refused: list[RefusedRow] = []
    if (known := format_of(path)) is None:
        raise unrecognised(path)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        unpacked = stack.enter_context(unpacked_files([path], folder / "rollouts"))
        tally = ImportTally(
            refused.append,
            lambda read: workspace.shown(unpacked.original(read)),
            redaction.text,
        )
        collected = RowCollector(stack.enter_context(Spill(folder)), redaction, tally)
        writer = RolloutWriter(collected, tally, stack.enter_context(Spill(folder)))
        for row in known.read([unpacked.read_from(path)]):
            collected.take(row, known.name)
            yield from refused
            refused.clear()
        joined = joined_rows(collected.rows, collected.tree)
        feedback = settled_feedback(collected, joined, tally)
        yield from refused
        builder, side = RolloutBuilder(collected, joined, redaction), RolloutSide()
        for kept in joined.kept:
            writer.take(builder.build(kept), feedback.get(kept, {}), side)
        writer.name_tasks(side)
        for kept, data in zip(joined.kept, writer.rows_of(side), strict=True):
            yield ForeignRollout(collected.rows.facts(kept).source, data)
