"""Runs import_rollouts: reads the source files, joins calls into rollouts, and writes them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

from stillroom.data.near_duplicates import MinHasher
from stillroom.errors import DataError
from stillroom.importing.conversations.collector import RowCollector
from stillroom.importing.conversations.rollouts import RolloutBuilder, join_rows
from stillroom.importing.input_files import (
    PARTLY_DECOMPRESSED,
    DecompressedFiles,
    decompressed_files,
)
from stillroom.importing.output.feedback import scores_from_feedback
from stillroom.importing.output.notes import import_notes, model_records, notes_on_files
from stillroom.importing.output.rows import RolloutWriter, SplitPart
from stillroom.importing.output.split import Split, split_rollouts
from stillroom.importing.payloads.calls import NO_CALL
from stillroom.importing.records import Location, RefusedRow, SourceRow, TraceFormat
from stillroom.importing.redaction import Redaction
from stillroom.importing.request import HeldOut, ImportResult, ImportRollouts
from stillroom.importing.sources import ImportSources, group_by_format
from stillroom.importing.spill import Spill
from stillroom.importing.tally import ImportTally
from stillroom.lineage import FileRecord, Recording
from stillroom.outputs import NewOutput, new_output
from stillroom.rollout.sources import check_output
from stillroom.settings import Workspace
from stillroom.types import RowReason

OPERATION = "import_rollouts"
_UNKNOWN_FORMAT = "unknown"
_MAX_UNREAD = 20
_NOTHING_TO_READ = {NO_CALL, RowReason.FAILED}


@dataclass(frozen=True, slots=True)
class ImportOutputs:
    """The paths of the files that an import writes; None for a file that was not requested."""

    rollouts: Path
    refused: Path
    prompts: Path | None
    heldout: Path | None
    heldout_prompts: Path | None

    @classmethod
    def of(cls, workspace: Workspace, request: ImportRollouts) -> "ImportOutputs":
        """Returns the paths for a request."""
        output = workspace.output_file(request.output, label="output")
        is_split = request.split_heldout is not None
        return cls(
            rollouts=output,
            refused=output.with_name(output.name + ".refused"),
            prompts=_sibling(output, "prompts") if request.prompts else None,
            heldout=_sibling(output, "heldout") if is_split else None,
            heldout_prompts=_sibling(output, "heldout.prompts")
            if is_split and request.prompts
            else None,
        )

    @property
    def row_files(self) -> list[Path]:
        """The paths of the output files with rows; each gets a manifest."""
        paths = (self.rollouts, self.prompts, self.heldout, self.heldout_prompts)
        return [path for path in paths if path is not None]


def _sibling(output: Path, word: str) -> Path:
    """Returns the path `NAME.word.jsonl` next to an output `NAME.jsonl`."""
    return output.with_name(f"{output.name.removesuffix('.jsonl')}.{word}.jsonl")


def import_rollouts(
    workspace: Workspace, request: ImportRollouts, *, accepts_ratings: bool = False
) -> ImportResult:
    """Writes the rollouts of the sources, and returns the counts.

    Raises InputError for sources that cannot be read and, unless `accepts_ratings`, for scores that
    do not tell right answers from wrong ones, and DataError if there are no rollouts.
    """
    outputs = ImportOutputs.of(workspace, request)
    written = [*outputs.row_files, outputs.refused]
    if request.split_heldout is not None:
        MinHasher()  # fails before the sources are read if the library for MinHash is missing
    sources = group_by_format(workspace, request, outputs=set(written))
    for path in written:
        check_output(path, sources.files)
    with (
        ExitStack() as stack,
        Spill(outputs.rollouts.parent) as source_spill,
        Spill(outputs.rollouts.parent) as output_spill,
        Recording(sources.files, may_grow=True) as recording,
    ):
        new_outputs = {
            path: stack.enter_context(_open_output(path, outputs, request))
            for path in outputs.row_files
        }
        decompressed = stack.enter_context(decompressed_files(sources.files, outputs.rollouts))
        spills = (source_spill, output_spill)
        importing = _Import(workspace, request, outputs, new_outputs, spills, decompressed)
        importing.read(sources)
        importing.write(accepts_ratings=accepts_ratings)
        importing.record(recording.records())
        return importing.result(sources, recording.grown)


def _open_output(
    path: Path, outputs: ImportOutputs, request: ImportRollouts
) -> AbstractContextManager[NewOutput]:
    side_files = [outputs.refused] if path == outputs.rollouts else []
    return new_output(path, *side_files, operation=OPERATION, overwrite=request.overwrite)


class _Import:
    """One import, from its sources to its outputs."""

    def __init__(
        self,
        workspace: Workspace,
        request: ImportRollouts,
        outputs: ImportOutputs,
        new_outputs: dict[Path, NewOutput],
        spills: tuple[Spill, Spill],
        decompressed: DecompressedFiles,
    ) -> None:
        """`spills` are two temporary files: for the rows that were read, and for those to write."""
        self._decompressed = decompressed
        self._workspace, self._request, self._outputs, self._new_outputs = (
            workspace,
            request,
            outputs,
            new_outputs,
        )
        self._redaction = Redaction(
            workspace.redactor(),
            keep_secrets=request.keep_secrets,
            keep_personal=request.keep_personal,
        )
        refused = new_outputs[outputs.rollouts].side[outputs.refused]
        self._tally = ImportTally(
            refused.write,
            lambda path: workspace.shown(decompressed.original(path)),
            self._redaction.redact_text,
        )
        source_spill, output_spill = spills
        self._collected = RowCollector(
            source_spill,
            self._redaction,
            self._tally,
            infer_tools=request.infer_tools,
            feedback_by=request.feedback_by,
        )
        self._writer = RolloutWriter(
            self._collected,
            self._tally,
            output_spill,
            reward_from=request.reward_from,
            infer_tools=request.infer_tools,
        )
        self._train = self._new_part(outputs.rollouts, outputs.prompts)
        self._heldout = (
            self._new_part(outputs.heldout, outputs.heldout_prompts) if outputs.heldout else None
        )
        self._split: Split | None = None

    def _new_part(self, rollouts: Path, prompts: Path | None) -> SplitPart:
        """Returns an empty part that writes to these files."""
        return SplitPart(
            self._new_outputs[rollouts].rows,
            None if prompts is None else self._new_outputs[prompts].rows,
        )

    def read(self, sources: ImportSources) -> None:
        """Reads every row of the sources."""
        for group in sources.formats:
            files = list(map(self._decompressed.readable_path, group.files))
            for row in _rows_of(group.format, files, self._request):
                self._collected.add(row, group.format.name)
            for file in group.files:
                if (problem := self._decompressed.problems.get(file)) is not None:
                    row = RefusedRow(Location(file, 1), PARTLY_DECOMPRESSED, problem)
                    self._collected.add(row, group.format.name)
        for path in sources.unread:
            self._tally.refuse(_UNKNOWN_FORMAT, RefusedRow(Location(path, 1), "unknown format"))

    def write(self, *, accepts_ratings: bool) -> None:
        """Joins the rows and writes the rollouts.

        Raises DataError if there are no rollouts, and, unless `accepts_ratings`, InputError if
        scores do not tell right answers from wrong ones.
        """
        joined = join_rows(self._collected.rows, self._collected.tree)
        if not joined.kept:
            raise self._no_rollouts_error()
        if (share := self._request.split_heldout) is not None:
            unredacted = RolloutBuilder(self._collected, joined, None)
            self._split = split_rollouts(joined, unredacted, share=share)
        id_field = self._request.feedback_by
        feedback = scores_from_feedback(self._collected, joined, self._tally, id_field=id_field)
        builder = RolloutBuilder(self._collected, joined, self._redaction)
        for row in joined.kept:
            is_heldout = self._split is not None and row in self._split.heldout
            part = self._heldout if is_heldout and self._heldout is not None else self._train
            self._writer.add(builder.build(row), feedback.get(row, {}), part)
        if not accepts_ratings:
            self._writer.check_rewards()
        self._writer.write([self._train] if self._heldout is None else [self._train, self._heldout])

    def _no_rollouts_error(self) -> DataError:
        """Returns the error for sources without a rollout, with the reasons."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self._tally.reasons.items())
        first = self._tally.first_refused
        return DataError(
            f"none of the {self._tally.total.read} rows has a readable conversation ({reasons})"
            + (f"; the first: {first[0]}" if first else ""),
            "import_rollouts reads conversations if it is given the right columns or format "
            "(see `stillroom docs traces`); a table of texts and labels needs no import: it is an "
            "input of run_recipe",
        )

    def record(self, inputs: Sequence[FileRecord]) -> None:
        """Writes the manifests of all outputs."""
        outputs, total = self._outputs, self._tally.total
        counts = {"read": total.read, "merged": total.merged, "refused": total.refused}
        for path, new in self._new_outputs.items():
            is_heldout = path in (outputs.heldout, outputs.heldout_prompts)
            part = self._heldout if is_heldout and self._heldout is not None else self._train
            new.record(
                inputs=[*inputs, *model_records(part.models)],
                request=self._request,
                counts={"rows": new.rows.num_rows, **counts},
                left_out=self._tally.reasons,
            )

    def result(self, sources: ImportSources, grown: Sequence[Path]) -> ImportResult:
        """Returns the result with all counts."""
        tally, counts, shown = self._tally, self._writer.counts, self._workspace.shown
        total, outputs = tally.total, self._outputs
        models = self._train.models + (self._heldout.models if self._heldout else Counter())
        by_model: dict[str, int] = {}
        for (_, model), rows in models.most_common():
            by_model[model] = by_model.get(model, 0) + rows
        return ImportResult(
            output=shown(outputs.rollouts),
            read=total.read,
            kept=total.kept,
            merged=total.merged,
            refused=total.refused,
            formats=tally.formats,
            refused_by_reason=dict(tally.reasons.most_common()),
            refused_file=shown(outputs.refused),
            problems=tally.first_refused,
            losses=dict(counts.dropped.most_common()),
            removed=dict(self._redaction.num_replaced.most_common()),
            models=by_model,
            calls_per_rollout=counts.calls.quantiles(),
            branches=counts.branches,
            scores=dict(counts.scores.most_common()),
            rewarded=counts.rewarded,
            prompts=shown(outputs.prompts) if outputs.prompts else None,
            heldout=self._heldout_result(),
            unread_files=self._unread_files(),
            notes=[
                *notes_on_files(tally, sources.unread, grown),
                *import_notes(self._request, counts, models, self._split),
            ],
        )

    def _unread_files(self) -> list[str]:
        """Returns the files of which nothing was read, without those that have nothing to read."""
        refused = self._tally.files.refused.items()
        unread = [name for name, file in refused if not set(file.reasons) <= _NOTHING_TO_READ]
        return unread[:_MAX_UNREAD]

    def _heldout_result(self) -> HeldOut | None:
        """Returns the result's part on held-out rollouts; None without a split."""
        split, outputs = self._split, self._outputs
        if split is None or outputs.heldout is None:
            return None
        shown, prompts = self._workspace.shown, outputs.heldout_prompts
        return HeldOut(
            output=shown(outputs.heldout),
            rollouts=len(split.heldout),
            families=split.num_heldout_families,
            by=split.by,
            prompts=shown(prompts) if prompts else None,
        )


def _rows_of(
    trace_format: TraceFormat, files: Sequence[Path], request: ImportRollouts
) -> Iterator[SourceRow]:
    """Yields the rows of files in one format."""
    if trace_format.read_columns is not None:
        return trace_format.read_columns(files, request.chosen_columns)
    return trace_format.read(files)
