"""Opens the pair of a student and a served teacher that reads its text in tokens of its own."""

from dataclasses import dataclass
from typing import Any

import anyio

from stillroom.errors import EngineError, ModelError
from stillroom.models.load import LoadedModel, load_tokenizer
from stillroom.models.reread.pair_check import open_pair_with_tokenizer, reading_note
from stillroom.models.reread.rereading import ReadingPair
from stillroom.models.resolve import locate_model
from stillroom.serving.preflight import check_rereading
from stillroom.settings import Workspace
from stillroom.train.config.distill_sections import DatasetTeacher, served_teacher
from stillroom.train.config.schema import TrainConfig


@dataclass(frozen=True, slots=True)
class ServedPair:
    """A student and a served teacher, with what the user should know about how it reads."""

    pair: ReadingPair | None
    """None: the teacher has the student's tokenizer and template, and scores its very tokens."""
    notes: list[str]


def open_served_pair(
    workspace: Workspace, teacher: DatasetTeacher, student: LoadedModel, config: TrainConfig
) -> ServedPair:
    """Returns the pair, after the server was asked a few questions.

    Raises an EngineError if the teacher's tokenizer is not here or not the server's, or if the
    teacher could not read what the student writes.
    """
    tokenizer = _tokenizer(workspace, teacher)
    mode = config.rollout.reasoning_mode
    served = served_teacher(workspace, teacher, top_k=config.num_listed_tokens)
    server = anyio.run(check_rereading, served, tokenizer, teacher.tokenizer or teacher.path)
    pair = open_pair_with_tokenizer(
        student, tokenizer, teacher.path, mode, max_context=server.max_context
    )
    return ServedPair(pair, [reading_note(teacher.path, pair, is_served=True), server.note])


def _tokenizer(workspace: Workspace, teacher: DatasetTeacher) -> Any:
    name = teacher.tokenizer or teacher.path
    try:
        return load_tokenizer(locate_model(workspace, name))
    except EngineError as error:
        raise ModelError(
            f"the tokenizer {name!r} of the served teacher is not here, and with teacher.tokens: "
            f"reread its text is written and cut in this process: {error.problem}",
            "set teacher.tokenizer to the folder or hub id of the model that is served",
        ) from error
