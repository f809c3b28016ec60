"""A teacher behind a vLLM or SGLang server that scores a student's rollouts."""

from stillroom.serving.model_server import ModelServer
from stillroom.serving.score_replies import Question, ScoringProvider
from stillroom.teachers.scores import TeacherScores
from stillroom.types import TokenTrace


class ServedTeacher:
    """Scores the sampled tokens of finished rollouts, with one call per rollout."""

    def __init__(
        self,
        server: ModelServer,
        model: str,
        *,
        provider: ScoringProvider,
        top_k: int | None = None,
    ) -> None:
        self.server, self.model = server, model
        self.provider: ScoringProvider = provider
        self.top_k = top_k

    @property
    def concurrency(self) -> int:
        """The maximum number of rollouts that are scored at once."""
        return self.server.settings.concurrency

    async def score(self, trace: TokenTrace) -> TeacherScores:
        """Returns the teacher's log-probabilities of a rollout's sampled tokens.

        Tokens after the last sampled one are not sent, since no score depends on them, and nothing
        is if there is none.

        Raises:
            CallFailedError: every attempt failed, so the rollout has no scores.
            TeacherError: no call can succeed.
        """
        wanted = [i for i, is_sampled in enumerate(trace.sampled) if is_sampled and i > 0]
        if not wanted:
            return TeacherScores([], [], [])
        ids = trace.ids[: wanted[-1] + 1]
        question = Question(self.model, ids, wanted, self.top_k)
        path, body = question.request(self.provider)
        return await self.server.post(
            path, body, lambda answer: question.read(self.provider, answer), tokens=len(ids)
        )
