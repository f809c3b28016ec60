"""The judge that a request names: the content of judge.yml, its plan, and how it is opened."""

from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

from pydantic import Field, field_validator

from stillroom.rollout.request import NO_FILE
from stillroom.rollout.rewards.judge import (
    AnswerJudge,
    JudgeSees,
    ReplyFormat,
    rubric_path,
    rubric_text,
)
from stillroom.settings import Workspace
from stillroom.teachers.budget import Budget
from stillroom.teachers.endpoint.client import CallSettings, OpenAITeacher, Spending
from stillroom.teachers.model_choice import ModelChoice, read_model_file
from stillroom.teachers.pricing import Price
from stillroom.teachers.providers import IN_PROCESS, Endpoint
from stillroom.types import SamplingSettings


class JudgeFile(ModelChoice):
    """The content of judge.yml: a model that judges answers, and its rubric."""

    rubric: str
    """The text that says what makes an answer good, or the name of a .md or .txt file with it."""
    sees: JudgeSees = "answer"
    """Whether the judge sees only the final answer, or also the turns and tool replies."""
    reply_format: ReplyFormat = "json_schema"
    """The reply format that the endpoint is asked to enforce; replies are checked in any case."""
    max_tokens: Annotated[int, Field(ge=64)] = 1024
    """The maximum number of tokens of one reply of the judge."""

    @field_validator("provider")
    @classmethod
    def _check_endpoint(cls, provider: str) -> str:
        if provider in IN_PROCESS:
            raise ValueError(
                "a judge must be an HTTP endpoint: serve the model with vllm, sglang or ollama"
            )
        return provider


@dataclass(frozen=True, slots=True)
class JudgePlan:
    """A checked judge.yml, with the rubric, the endpoint and the price that it names."""

    file: JudgeFile
    """The content of judge.yml; its rubric is the text even where judge.yml names a file."""
    path: Path
    """The path of judge.yml."""
    endpoint: Endpoint
    price: Price | None
    """The price of the judge's tokens; None if it is unknown."""
    rubric_file: Path | None = None
    """The path of the file with the rubric; None if judge.yml holds it."""

    @property
    def inputs(self) -> list[Path]:
        """The files that were read."""
        return [self.path] if self.rubric_file is None else [self.path, self.rubric_file]


def plan_judge(workspace: Workspace, name: str, *, needs_key: bool = True) -> JudgePlan | None:
    """Returns the plan of the judge in the file `name`; None if the name is `none`.

    Without `needs_key` the judge will not be called, so its key need not be set.
    Raises InputError for an unusable judge, before anything is spent.
    """
    if name == NO_FILE:
        return None
    path = workspace.existing(name, label="judge")
    fix = "write `model: …` and `rubric: what makes an answer good`"
    file = read_model_file(path, JudgeFile, what="judge", fix=fix)
    endpoint = cast("Endpoint", file.locate(workspace, needs_key=needs_key))
    rubric_file = rubric_path(workspace, file.rubric)
    rubric = rubric_text(file.rubric, rubric_file)
    price = file.price(workspace)
    file = file.model_copy(update={"rubric": rubric})
    return JudgePlan(file, path, endpoint, price, rubric_file)


async def open_judge(
    stack: AsyncExitStack,
    workspace: Workspace,
    plan: JudgePlan | None,
    *,
    timeout_s: float,
    budget: Budget | None = None,
) -> AnswerJudge | None:
    """Opens a plan's judge, whose calls count against the budget; returns None without a plan."""
    if plan is None:
        return None
    file, endpoint = plan.file, plan.endpoint
    model = await stack.enter_async_context(
        OpenAITeacher(
            endpoint,
            file.model,
            SamplingSettings(temperature=0.0, max_tokens=file.max_tokens),
            key=workspace.read_key(endpoint.api_key_env),
            calls=CallSettings(timeout_s=timeout_s),
            spending=Spending(plan.price, budget or Budget()),
        )
    )
    return AnswerJudge(model, file.rubric, sees=file.sees, reply_format=file.reply_format)
