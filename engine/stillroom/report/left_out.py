"""The rows that each stage left out on the way from prompts or logs to a trained model."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from stillroom.errors import DataError
from stillroom.lineage import FileRecord, read_manifest
from stillroom.report.folders import TRAINING_KINDS, Run
from stillroom.report.wording import count, plural

_MAX_STAGES = 40
_MAX_REASONS = 12
_WRITTEN_KEYS = ("kept", "converted", "pairs", "rows")
"""The keys under which the operations' manifests count the rows that were written."""
_UNKNOWN_REASON = "for reasons that an older version did not record"


@dataclass(frozen=True, slots=True)
class DataStage:
    """One operation on rows, as its manifest records it."""

    operation: str
    output: str
    counts: Mapping[str, int]
    left_out: Mapping[str, int]
    """The number of rows that it left out, by reason."""


StagesOf = Callable[[FileRecord], Iterable[DataStage]]
"""Returns the operations that made a file's rows, latest first."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """One stage in the report."""

    stage: str
    output: str
    kept: str | None
    """The number of rows that it kept, as text; None if it is not recorded."""
    reasons: str
    """The numbers of rows that it left out, by reason, as text."""


def left_out_rows(runs: Sequence[Run], stages_of: StagesOf) -> list[LeftOut]:
    """Returns what each stage up to the training runs kept and left out; each stage once."""
    stages: dict[LeftOut, None] = {}
    for run in runs:
        if run.state.kind in TRAINING_KINDS and run.state.result is not None:
            stages.update(dict.fromkeys(_stages_of_training(run, run.state.result, stages_of)))
    return [*stages][-_MAX_STAGES:]


def _stages_of_training(
    run: Run, result: Mapping[str, Any], stages_of: StagesOf
) -> Iterator[LeftOut]:
    """Yields the stages that made the rows of a training run, and the run itself."""
    manifest = None
    with suppress(DataError, OSError):
        manifest = read_manifest(run.folder / "checkpoints" / "final")
    for record in manifest.inputs if manifest is not None else ():
        for stage in reversed([*stages_of(record)]):
            yield LeftOut(
                stage.operation, stage.output, _written_text(stage.counts), _reasons_of(stage)
            )
    rows, skipped = result.get("rows"), result.get("skipped")
    yield LeftOut(
        "start_training",
        run.run_id,
        plural(rows, "row") if isinstance(rows, int) else None,
        _reasons_text(cast("dict[str, int]", skipped) if isinstance(skipped, dict) else {}),
    )


def _written_text(counts: Mapping[str, int]) -> str | None:
    """Returns the number of written rows, as text."""
    name = next((name for name in _WRITTEN_KEYS if name in counts), None)
    return None if name is None else plural(counts[name], "pair" if name == "pairs" else "row")


def _reasons_of(stage: DataStage) -> str:
    """Returns how many rows a stage left out for each reason, as text."""
    counts, reasons = stage.counts, dict(stage.left_out)
    if failed := counts.get("failed"):
        reasons["failed"] = failed
    written = counts.get("kept", counts.get("converted"))
    if not reasons and written is not None and counts.get("read", 0) > written:
        reasons[_UNKNOWN_REASON] = counts["read"] - written
    return _reasons_text(reasons)


def _reasons_text(reasons: Mapping[str, int]) -> str:
    """Returns numbers by reason as text, the largest first."""
    largest = sorted(reasons.items(), key=lambda item: -item[1])
    texts = [f"{count(number)} {reason}" for reason, number in largest[:_MAX_REASONS]]
    if num_others := sum(number for _, number in largest[_MAX_REASONS:]):
        texts.append(f"{count(num_others)} for other reasons")
    return ", ".join(texts) or "none"
