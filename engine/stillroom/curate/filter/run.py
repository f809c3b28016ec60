"""filter_dataset: reads and judges rows, writes those that pass, and counts all of them."""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from stillroom import fences
from stillroom.curate.convert import MAX_EXAMPLES
from stillroom.curate.filter.across_rows import judge_rows
from stillroom.curate.filter.contamination import (
    ContaminationIndex,
    CountedPrompt,
    EvaluationPrompt,
    evaluation_prompts,
)
from stillroom.curate.filter.request import Distributions, DroppedRow, FilterDataset, FilterResult
from stillroom.curate.filter.rules import (
    CONTAMINATED,
    FilterContext,
    Reasons,
    count_tokens,
    success_of,
    user_text,
)
from stillroom.curate.filter.source_counts import SourceCounts
from stillroom.curate.rows import NO_CATEGORY, OTHERS, UNREADABLE, CuratedRow
from stillroom.curate.sources import RowInputs, data_files, open_inputs, open_rows
from stillroom.curate.verdicts import RowVerdicts, find_reviewed_rows, read_verdicts
from stillroom.data.chat.render import ChatRenderer
from stillroom.data.distribution import Distribution
from stillroom.data.layouts.detect import RolloutLayout
from stillroom.data.row_files import rollout_files
from stillroom.data.row_names import RowNames
from stillroom.data.statistics import missing_field_note
from stillroom.data.words import strings_in
from stillroom.files import LineWriter
from stillroom.lineage import FileRecord, Recording
from stillroom.outputs import NewOutput, new_output
from stillroom.secrecy.patterns import has_reserved_address
from stillroom.settings import Workspace

_MAX_CATEGORIES = 50
_LARGE_SHARE = 0.2
_MIN_CATEGORY_SIZE = 5
"""There are no warnings about a category with fewer rows."""
_MAX_WARNINGS = 5


def filter_dataset(
    workspace: Workspace, request: FilterDataset, *, tokenizer: Any = None
) -> FilterResult:
    """Writes the rows that pass, unchanged, and the reasons to drop the others to the side file.

    `tokenizer` is the student's; it is needed if `request.model` is set.
    """
    renderer = ChatRenderer(tokenizer) if tokenizer is not None else None
    with open_filtering(workspace, request) as filtering:
        with Recording([*filtering.files, *filtering.other_files]) as recording:
            context = _filter_context(workspace, request, filtering.rows, renderer)
            tally = FilterTally(request)
            kept, dropped = filtering.output.rows, filtering.dropped
            writer = RowWriter(tally, renderer, kept=kept, dropped=dropped, inputs=filtering.inputs)
            for row, reasons in judge_rows(filtering.rows, request, context):
                writer.write(row, reasons)
            filtering.drop_refused(tally)
            filtering.record(tally, recording.records())
        return filtering.result(tally, context)


class RowWriter:
    """Writes rows to the output or the side file, and counts them; the rows must be in order."""

    def __init__(
        self,
        tally: "FilterTally",
        renderer: ChatRenderer | None,
        *,
        kept: LineWriter,
        dropped: LineWriter,
        inputs: RowInputs,
    ) -> None:
        self._tally, self._renderer, self._kept, self._dropped = tally, renderer, kept, dropped
        self._inputs = inputs
        self._names = RowNames()

    def write(self, row: CuratedRow, reasons: Reasons) -> None:
        """Writes a row to the output or, if there are `reasons` to drop it, to the side file."""
        self._tally.add(row, reasons, self._renderer)
        name = self._names.name(row.path, row.line.view)
        if reasons:
            self._dropped.write(self._dropped_row(row, name, reasons))
        else:
            self._kept.write_raw(row.line.view, source=row.line.source)

    def _dropped_row(self, row: CuratedRow, name: str, reasons: Reasons) -> DroppedRow:
        """Returns a row's line for the side file."""
        texts = [reason.text for reason in reasons]
        like = next((reason.like for reason in reasons if reason.like), None)
        if like is not None and self._inputs.imported:
            path, _, line = like.rpartition(":")
            like = "{}:{}".format(*self._inputs.original_location(Path(path), int(line)))
        file, number = self._inputs.original_location(row.path, row.line.number)
        return DroppedRow(file, number, row.id, texts, like, name)


@contextmanager
def open_filtering(workspace: Workspace, request: FilterDataset) -> Generator["Filtering"]:
    """Opens the inputs and outputs of filter_dataset.

    Raises InputError if an output is one of the inputs, or already has rollouts.
    """
    path = workspace.output_file(request.output, label="output")
    dropped_file = path.with_name(path.name + ".dropped")
    other_files = [file for name in request.decontaminate for file in data_files(workspace, name)]
    if request.verdicts is not None:
        other_files += rollout_files(workspace.existing(request.verdicts, label="verdicts"))
    opening = open_inputs(
        workspace,
        request.inputs,
        outputs=[path, dropped_file],
        other_files=other_files,
        with_supervised=True,
    )
    with (
        opening as inputs,
        new_output(
            path, dropped_file, operation="filter_dataset", overwrite=request.overwrite
        ) as output,
    ):
        yield Filtering(workspace, request, inputs, output, other_files)


class Filtering:
    """The inputs and outputs of filter_dataset, in one process or on a cluster."""

    def __init__(
        self,
        workspace: Workspace,
        request: FilterDataset,
        inputs: RowInputs,
        output: NewOutput,
        other_files: list[Path],
    ) -> None:
        """`other_files` are the files of evaluation prompts and verdicts."""
        self._workspace, self._request = workspace, request
        self.inputs, self.output, self.other_files = inputs, output, other_files
        self.files = [file.path for file in inputs.files]
        [(self._dropped_file, self.dropped)] = output.side.items()

    def rows(self) -> Iterator[CuratedRow]:
        """Yields all rows of the input."""
        return self.inputs.rows(with_supervised=True)

    def drop_refused(self, tally: "FilterTally") -> None:
        """Drops the rows of other systems' files that are not conversations."""
        for refused in self.inputs.refused:
            file, _, line = refused.source.rpartition(":")
            path, number = self._workspace.path(file), int(line.partition("#")[0])
            self.dropped.write(DroppedRow(str(path), number, None, [refused.reason]))
            problem = f"{refused.source}: {refused.reason} {refused.detail}"
            tally.add_refused(refused.reason, problem, source=file)

    def record(self, tally: "FilterTally", input_records: Sequence[FileRecord]) -> None:
        """Writes the manifest of the outputs, which names the input files."""
        counts = {"read": tally.num_read, "kept": tally.num_kept}
        inputs = self.inputs.records(input_records)
        self.output.record(
            inputs=inputs, request=self._request, counts=counts, left_out=tally.dropped
        )

    def result(self, tally: "FilterTally", context: FilterContext) -> FilterResult:
        """Returns the result; call it when all rows have been counted."""
        output, dropped = self.output.path, self._dropped_file
        result = tally.result(self._workspace, output, dropped, context.verdicts)
        return msgspec.structs.replace(result, problems=[*result.problems, *self.inputs.notes])


class TaskSurvey:
    """Collects what filters need from all rows before they judge the first one.

    These are the success rates of the tasks, and the n-grams that many prompts share.
    """

    def __init__(self, request: FilterDataset, index: ContaminationIndex | None) -> None:
        self.is_needed = index is not None or request.min_success_rate is not None
        self._index = index
        self._num_with_outcome: Counter[str] = Counter()
        self._num_succeeded: Counter[str] = Counter()
        self.prompts: list[CountedPrompt] | None = None
        """The counted prompts, for `merge` of another survey; None unless they are collected."""

    def add(self, row: CuratedRow) -> None:
        """Adds one row to the survey."""
        if row.facts is None:
            return
        if self._index is not None:
            counted = self._index.count_prompt(user_text(row))
            if counted is not None and self.prompts is not None:
                self.prompts.append(counted)
        # A rollout that an infrastructure failure ended says nothing about its task.
        if row.facts.error is None and (success := success_of(row.facts)) is not None:
            self._num_with_outcome[row.task_id] += 1
            self._num_succeeded[row.task_id] += success

    def merge(self, other: "TaskSurvey") -> None:
        """Adds the counts of another survey, of other rows."""
        self._num_with_outcome.update(other._num_with_outcome)
        self._num_succeeded.update(other._num_succeeded)
        for counted in other.prompts or ():
            if self._index is not None:
                self._index.add_counted(counted)

    def forget_index(self) -> None:
        """Removes the index of evaluation prompts, to keep the survey small when it is sent."""
        self._index = None

    def success_rates(self) -> dict[str, float]:
        """Returns the success rate, from 0 to 1, of each task with a known one."""
        return {
            task: self._num_succeeded[task] / count
            for task, count in self._num_with_outcome.items()
        }


def evaluation_index(workspace: Workspace, request: FilterDataset) -> ContaminationIndex | None:
    """Returns a new index of the request's evaluation prompts; None if it names no files."""
    prompts: list[EvaluationPrompt] = []
    output = workspace.output_file(request.output, label="output")
    for name in request.decontaminate:
        with open_rows(workspace, name, output=output) as rows:
            prompts += evaluation_prompts(
                [file.path for file in rows.files], rows.original_location, name
            )
    return ContaminationIndex(prompts) if prompts else None


def match_verdicts(
    workspace: Workspace, request: FilterDataset, read_rows: Callable[[], Iterator[CuratedRow]]
) -> RowVerdicts:
    """Returns the request's verdicts, matched to the rows of the input.

    Raises InputError for an id that several rows have.
    """
    if request.verdicts is None:
        return RowVerdicts()
    verdicts = read_verdicts(workspace.existing(request.verdicts, label="verdicts"))
    return find_reviewed_rows(
        verdicts, read_rows(), workspace.shown, with_copies=request.verdicts_for_copies
    )


def _filter_context(
    workspace: Workspace,
    request: FilterDataset,
    read_rows: Callable[[], Iterator[CuratedRow]],
    renderer: ChatRenderer | None,
) -> FilterContext:
    """Returns the context of the filters; for some filters this reads all rows once."""
    verdicts = match_verdicts(workspace, request, read_rows)
    index = evaluation_index(workspace, request)
    survey = TaskSurvey(request, index)
    if survey.is_needed:
        for row in read_rows():
            survey.add(row)
    if index is not None:
        index.finish_counting()
    return FilterContext(renderer, survey.success_rates(), index, verdicts)


class _RowStatistics:
    """Collects the distributions and the counts per category of a set of rows."""

    def __init__(self) -> None:
        self._reward, self._turns = Distribution(), Distribution()
        self._characters, self._tokens = Distribution(), Distribution()
        self._categories: Counter[str] = Counter()

    def merged(self, other: "_RowStatistics") -> "_RowStatistics":
        """Returns the statistics of the rows of both sets together."""
        both = _RowStatistics()
        both._reward = self._reward.merged(other._reward)
        both._turns = self._turns.merged(other._turns)
        both._characters = self._characters.merged(other._characters)
        both._tokens = self._tokens.merged(other._tokens)
        both._categories = self._categories + other._categories
        return both

    def add(self, row: CuratedRow, category: str) -> None:
        """Adds a row; one without facts counts only in its category."""
        self._categories[category] += 1
        facts = row.facts
        if facts is None:
            return
        self._turns.add(facts.num_turns)
        self._characters.add(facts.num_characters)
        if facts.reward is not None:
            self._reward.add(facts.reward)
        if row.num_tokens is not None:
            self._tokens.add(row.num_tokens)

    def add_unreadable(self) -> None:
        """Adds a row that cannot be read."""
        self._categories[UNREADABLE] += 1

    @property
    def num_rows(self) -> int:
        """The number of rows that were added, including unreadable ones."""
        return self._categories.total()

    def size_of(self, category: str) -> int:
        """Returns the number of rows of a category."""
        return self._categories[category]

    def distributions(self) -> Distributions:
        """Returns the distributions of the readable rows."""
        return Distributions(
            reward=self._reward.quantiles(),
            rows_with_reward=self._reward.count,
            turns=self._turns.quantiles(),
            characters=self._characters.quantiles(),
            tokens=self._tokens.quantiles(),
        )

    def categories(self) -> dict[str, int]:
        """Returns the number of rows per category; all but the 50 largest are added up."""
        if len(self._categories) <= _MAX_CATEGORIES:
            return dict(sorted(self._categories.items()))
        largest = dict(self._categories.most_common(_MAX_CATEGORIES))
        return {**largest, OTHERS: self._categories.total() - sum(largest.values())}


class FilterTally:
    """Counts the rows that are kept, and those that are dropped, by reason."""

    def __init__(self, request: FilterDataset) -> None:
        self._category_field = request.category_field
        self._is_decontaminated = bool(request.decontaminate)
        self._counts_turns = request.min_turns is not None or request.max_turns is not None
        self._drops_pii = request.drop_pii
        self._num_gym_rows = self._num_reserved_addresses = 0
        self._kept_rows, self._dropped_rows = _RowStatistics(), _RowStatistics()
        self._success_derived = 0
        self._dropped: Counter[str] = Counter()
        self._dropped_by_category: Counter[tuple[str, str]] = Counter()
        self._all_reasons: Counter[str] = Counter()
        self._problems: list[str] = []
        self._sources, self._metadata_fields = SourceCounts(), set[str]()

    @property
    def num_read(self) -> int:
        """The number of rows that were read."""
        return self._kept_rows.num_rows + self._dropped_rows.num_rows

    @property
    def num_kept(self) -> int:
        """The number of rows that are kept."""
        return self._kept_rows.num_rows

    @property
    def dropped(self) -> Mapping[str, int]:
        """The number of dropped rows by their first reason."""
        return self._dropped

    def add(self, row: CuratedRow, reasons: Reasons, renderer: ChatRenderer | None) -> None:
        """Adds a row with the reasons to drop it; with a renderer, also counts its tokens."""
        facts = row.facts
        self._num_gym_rows += row.layout is RolloutLayout.NEMO_GYM
        if facts is not None:
            if facts.success is None:
                self._success_derived += 1
            if renderer is not None:
                count_tokens(row, renderer)
        category = row.category(self._category_field)
        if category == NO_CATEGORY and facts is not None:
            self._metadata_fields.update(facts.metadata or ())
        source = (facts and facts.original_file) or str(row.path)
        self._sources.add(source, is_kept=not reasons)
        if not reasons:
            self._kept_rows.add(row, category)
            if self._drops_pii and b"@" in row.line.data:
                self._num_reserved_addresses += has_reserved_address(
                    "\n".join(strings_in(row.fields))
                )
            return
        self._dropped_rows.add(row, category)
        self._dropped[reasons[0].text] += 1
        self._dropped_by_category[reasons[0].text, category] += 1
        self._all_reasons.update(reason.text for reason in reasons)
        if facts is None and row.problem and len(self._problems) < MAX_EXAMPLES:
            self._problems.append(f"{row.where}: {row.problem}")

    def add_refused(self, reason: str, problem: str, *, source: str) -> None:
        """Adds a row of another system that is not a conversation."""
        self._sources.add(source, is_kept=False)
        self._dropped_rows.add_unreadable()
        self._dropped[reason] += 1
        self._all_reasons[reason] += 1
        if len(self._problems) < MAX_EXAMPLES:
            self._problems.append(problem.strip())

    def merge(self, other: "FilterTally") -> None:
        """Adds the counts of another tally, whose rows follow those of this one."""
        self._success_derived += other._success_derived
        self._num_gym_rows += other._num_gym_rows
        self._num_reserved_addresses += other._num_reserved_addresses
        self._kept_rows = self._kept_rows.merged(other._kept_rows)
        self._dropped_rows = self._dropped_rows.merged(other._dropped_rows)
        self._dropped.update(other._dropped)
        self._dropped_by_category.update(other._dropped_by_category)
        self._all_reasons.update(other._all_reasons)
        self._sources.merge(other._sources)
        self._metadata_fields |= other._metadata_fields
        self._problems += other._problems[: MAX_EXAMPLES - len(self._problems)]

    def result(
        self, workspace: Workspace, output: Path, dropped_file: Path, verdicts: RowVerdicts
    ) -> FilterResult:
        """Returns the counts and distributions of all rows.

        Verdicts that match no row of the input are reported in `problems`.
        """
        if verdicts.num_unmatched:
            unmatched = f"{verdicts.num_unmatched} of {verdicts.num_verdicts} verdicts"
            self._problems.append(f"{unmatched} match no row of the input")
        before, after = self._kept_rows.merged(self._dropped_rows), self._kept_rows
        is_default = self._category_field == FilterDataset.model_fields["category_field"].default
        if not is_default and before.categories().keys() <= {NO_CATEGORY, UNREADABLE}:
            self._problems.append(missing_field_note(self._category_field, self._metadata_fields))
        return FilterResult(
            output=workspace.shown(output),
            read=self.num_read,
            kept=self.num_kept,
            dropped=dict(self._dropped),
            failed_filters=dict(self._all_reasons),
            dropped_file=workspace.shown(dropped_file),
            before=before.distributions(),
            after=after.distributions(),
            categories_before=before.categories(),
            categories_after=after.categories(),
            success_derived=self._success_derived,
            sources=self._sources.by_name(workspace.shown),
            problems=self._problems,
            contamination={
                level: self._all_reasons[text]
                for level, text in CONTAMINATED.items()
                if self._is_decontaminated
            },
            warnings=self._warnings(before),
        )

    def _warnings(self, before: _RowStatistics) -> list[str]:
        """Returns warnings on email addresses, NeMo Gym's turns and filters that drop many rows."""
        warnings: list[str] = []
        if self._num_reserved_addresses:
            warnings.append(
                f"{self._num_reserved_addresses} kept rows have email addresses in domains "
                "reserved for examples (.example, .test, .local and similar): drop_pii keeps these "
                "rows because no mail reaches such addresses; to drop the rows, use not_contains "
                "with match=conversation"
            )
        if self._counts_turns and self._num_gym_rows:
            warnings.append(
                f"{self._num_gym_rows} rows are from NeMo Gym, whose tutorial also counts tool "
                "calls and replies as turns; min_turns and max_turns count assistant messages only"
            )
        warnings += [
            f"{count} of {self.num_read} rows were dropped for {text!r}"
            for text, count in self._dropped.most_common()
            if count > _LARGE_SHARE * self.num_read
        ]
        for (text, category), count in self._dropped_by_category.most_common():
            size = before.size_of(category)
            if _MIN_CATEGORY_SIZE <= size < self.num_read and count > size / 2:
                warnings.append(
                    f"{count} of the {size} rows of category {fences.safe_name(category)!r} were "
                    f"dropped for {text!r}"
                )
        return warnings[:_MAX_WARNINGS]
