"""Who scores the student's tokens: a model in this process, or a server."""

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import httpx

from stillroom.errors import CallFailedError, ConfigError
from stillroom.models.load import load_model
from stillroom.models.pairing import check_pair
from stillroom.models.resolve import locate_model
from stillroom.rollout.collect import FailedRollout, Outcome, key_of
from stillroom.settings import Workspace
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.teachers.scores import TeacherScores
from stillroom.teachers.served import ServedTeacher
from stillroom.train.config import TrainConfig
from stillroom.train.student import Student
from stillroom.train.teacher_servers import served_teacher
from stillroom.types import Failure


@dataclass(slots=True)
class Teachers:
    """The teacher of a run. Use as an async context manager."""

    local: Mapping[int, LocalTeacher] = field(default_factory=dict[int, LocalTeacher])
    """Those in this process, by the dataset they are for: they are asked in the update."""
    served: ServedTeacher | None = None
    """Behind a server: it is asked as each rollout ends."""
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    @property
    def num_scored_at_once(self) -> int:
        """How many rollouts a server may be scoring."""
        return self.served.concurrency if self.served is not None else 0

    async def __aenter__(self) -> Self:
        if self.served is not None:
            await self._stack.enter_async_context(self.served.server)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    async def score(self, outcome: Outcome) -> TeacherScores | FailedRollout | None:
        """Returns what a server says of a finished rollout's tokens; None if none is asked.

        A rollout that could not be scored has failed: nothing stands in for the scores.
        """
        if self.served is None or isinstance(outcome, FailedRollout):
            return None
        if outcome.tokens is None or not any(outcome.tokens.sampled):
            return None
        try:
            return await self.served.score(outcome.tokens)
        except CallFailedError as error:
            failure = Failure(kind=error.kind, message=f"the teacher's scores: {error.message}")
            return FailedRollout(key_of(outcome), failure, outcome.turns)


def load_teachers(
    workspace: Workspace,
    config: TrainConfig,
    student: Student,
    *,
    transport: httpx.AsyncBaseTransport | None = None,
) -> Teachers:
    """Returns the teacher that config.yml names; one in this process is loaded and checked."""
    section = config.teacher
    if section is None:
        raise ConfigError("dataset_type distill needs teacher.path", "name the teacher's model")
    if section.is_served:
        return Teachers(
            served=served_teacher(
                workspace, section, top_k=config.algorithm.told_tokens, transport=transport
            )
        )
    location = locate_model(workspace, section.path)
    loaded = load_model(workspace, location, precision=section.precision)
    check_pair(student.loaded, loaded)
    return Teachers(local={0: LocalTeacher(loaded)})
