"""Plans how a teacher refines a student's rollouts, and reads the failed ones."""

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

import msgspec
from pydantic import Field

from stillroom.data.row_files import RowReader, read_row_lines
from stillroom.errors import DataError, InputError
from stillroom.files import file_sha256
from stillroom.models.chat_template import TemplateSource, template_source
from stillroom.models.resolve import ModelLocation
from stillroom.rollout.journal.records import RolloutKey
from stillroom.rollout.request import NO_FILE, RefineOptions
from stillroom.rollout.sources import source_files
from stillroom.settings import Workspace
from stillroom.teachers.model_choice import ModelChoice, read_model_file
from stillroom.teachers.pricing import Price
from stillroom.teachers.providers import IN_PROCESS, Endpoint
from stillroom.types import Failure, Message, StopReason, TeacherRecord

_MIN_FAILED_SHARE = 0.5
"""The minimum share of failed rollouts that makes a prompt hard."""


class CriticFile(ModelChoice):
    """The content of critic.yml: the model that finds the first wrong turn of a rollout."""

    max_tokens: Annotated[int, Field(ge=8)] = 1024
    """The maximum number of tokens of one reply of the critic, its thinking included."""


@dataclass(frozen=True, slots=True)
class CriticPlan:
    """A checked critic.yml, with the endpoint or model and the price that it names."""

    file: CriticFile
    path: Path
    policy: Endpoint | ModelLocation
    price: Price | None


@dataclass(frozen=True, slots=True)
class RefinePlan:
    """A checked `refine`: the files of the student's rollouts, and the models that take part."""

    options: RefineOptions
    files: list[Path]
    student: ModelLocation | None
    """The student, if it continues after the teacher's turn."""
    student_record: TeacherRecord | None
    """The student's model and sampling settings as its rollouts record them; None if `student` is
    None."""
    critic: CriticPlan | None
    student_template: TemplateSource | None = None
    """The chat template of `student` in its rollouts; None: its own."""

    @property
    def inputs(self) -> list[Path]:
        """The files that the refined rollouts depend on."""
        template = self.student_template.files if self.student_template is not None else []
        return [*self.files, *template, *([self.critic.path] if self.critic is not None else [])]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that shape the rollouts, in addition to those of every run."""
        critic = self.critic.file.model_dump(mode="json") if self.critic is not None else None
        sources = [file_sha256(file) for file in self.files]
        names = ("turns", "train_turns")
        return {name: getattr(self.options, name) for name in names} | {
            "where": self.options.takeover,
            "critic": critic,
            "rollouts_sha256": sources,
        }


def plan_refinement(
    workspace: Workspace, options: RefineOptions, *, needs_keys: bool, has_budget: bool
) -> RefinePlan | None:
    """Returns the plan of a refinement; None if the request refines nothing.

    Raises InputError for every error that can be found before anything is spent.
    """
    if options.refine is None:
        return None
    files = [source.path for source in source_files(workspace, options.refine)]
    critic = None
    if options.critic != NO_FILE:
        critic = _plan_critic(workspace, options.critic, needs_keys, has_budget=has_budget)
    if options.turns == "rest":
        return RefinePlan(options, files, None, None, critic)
    first = next(read_row_lines(files[0]), None)
    record = None if first is None else _StudentRow.read(files[0], first.number, first.data).teacher
    if record is None or record.provider not in IN_PROCESS:
        raise InputError(
            f"`turns: one` needs a student that Stillroom can load, but the rollouts of "
            f"{options.refine} were not sampled in-process",
            "generate the student's rollouts with provider hf, or set `turns: rest`",
        )
    student = ModelChoice.model_validate({"model": record.model, "provider": record.provider})
    location = cast("ModelLocation", student.locate(workspace))
    template = template_source(
        workspace, record.chat_template, option="the student's chat_template"
    )
    return RefinePlan(options, files, location, record, critic, template)


def _plan_critic(
    workspace: Workspace, name: str, needs_keys: bool, *, has_budget: bool
) -> CriticPlan:
    path = workspace.existing(name, label="critic")
    file = read_model_file(path, CriticFile, what="critic", fix="write `model: …`")
    policy = file.locate(workspace, needs_key=needs_keys)
    return CriticPlan(file, path, policy, file.price(workspace, is_needed=has_budget))


class _StudentRow(msgspec.Struct, frozen=True):
    """The fields of a student's rollout that a refinement needs."""

    task_id: str
    sample: int
    messages: list[Message]
    turns: int
    stop_reason: StopReason = StopReason.ANSWERED
    id: str = ""
    success: bool | None = None
    error: Failure | None = None
    teacher: TeacherRecord | None = None

    @classmethod
    def read(cls, path: Path, number: int, data: bytes) -> "_StudentRow":
        """Decodes a line. Raises DataError if it is not a rollout of generate_rollouts."""
        try:
            return _STUDENT_ROW.decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise DataError(
                f"{path}:{number} is not a rollout of generate_rollouts: {error}",
                "give refine the rollouts of a student that generate_rollouts wrote",
            ) from error


_STUDENT_ROW = msgspec.json.Decoder(_StudentRow)
_FINISH_REASONS: dict[StopReason, Literal["stop", "length", "context", "filter"]] = {
    StopReason.MAX_TOKENS: "length",
    StopReason.CONTEXT_WINDOW: "context",
    StopReason.CONTENT_FILTER: "filter",
}


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    """A student's rollout, turn by turn."""

    id: str
    turns: list[Message]
    replies: list[list[Message]]
    """The messages after each turn, up to the next one."""
    finish_reason: Literal["stop", "length", "context", "filter"]
    """Why its last turn ended."""

    @property
    def steps(self) -> Iterator[tuple[Message, list[Message]]]:
        """The turns, each with the messages after it."""
        return zip(self.turns, self.replies, strict=True)


class FailedRollouts:
    """The failed rollouts in a list of files, read lazily.

    Raises DataError if a line is not a rollout, or if no rollout has a reward.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._reader = RowReader()
        # The index of each failed rollout in three arrays: its offset, its number of bytes, and the
        # index of its file.
        self._indices: dict[RolloutKey, int] = {}
        self._files, self._offsets, self._sizes = list(files), array("Q"), array("I")
        self._file_indices = array("I")
        rewarded, failed = Counter[str](), Counter[str]()
        for number, file in enumerate(files):
            for line in read_row_lines(file):
                row = _StudentRow.read(file, line.number, line.data)
                if row.success is None or row.error is not None or not row.turns:
                    continue
                rewarded[row.task_id] += 1
                if row.success:
                    continue
                failed[row.task_id] += 1
                self._indices[RolloutKey(row.task_id, row.sample)] = len(self._offsets)
                self._file_indices.append(number)
                self._offsets.append(line.offset)
                self._sizes.append(line.num_bytes)
        if not rewarded:
            raise DataError(
                f"no rollout in {files[0]} has a reward, so none counts as failed",
                "generate the student's rollouts with rewards, or from prompts with an "
                "expected_answer",
            )
        self.hard_task_ids = {
            task for task, num in failed.items() if num >= _MIN_FAILED_SHARE * rewarded[task]
        }
        """The ids of the prompts that the student failed in at least half of its rollouts."""

    @property
    def task_ids(self) -> set[str]:
        """The ids of the prompts with a failed rollout."""
        return {key.task_id for key in self._indices}

    @property
    def num_samples(self) -> int:
        """One more than the largest sample number of a failed rollout."""
        return 1 + max((key.sample for key in self._indices), default=0)

    def __len__(self) -> int:
        return len(self._indices)

    def __contains__(self, key: RolloutKey) -> bool:
        return key in self._indices

    def __getitem__(self, key: RolloutKey) -> RecordedRollout:
        """Returns a failed rollout. Raises DataError if its file has changed since."""
        number = self._indices[key]
        path = self._files[self._file_indices[number]]
        data = self._reader.read(path, self._offsets[number], self._sizes[number])
        row = _StudentRow.read(path, 0, data)
        # The prompt may hold assistant messages too: the rollout's turns are the last ones.
        begin = len(row.messages)
        seen = 0
        for index in range(len(row.messages) - 1, -1, -1):
            if row.messages[index]["role"] == "assistant":
                begin, seen = index, seen + 1
                if seen == row.turns:
                    break
        turns: list[Message] = []
        replies: list[list[Message]] = []
        for message in row.messages[begin:]:
            if message["role"] == "assistant":
                turns.append(message)
                replies.append([])
            else:
                replies[-1].append(message)
        return RecordedRollout(row.id, turns, replies, _FINISH_REASONS.get(row.stop_reason, "stop"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.__exit__(*error)
