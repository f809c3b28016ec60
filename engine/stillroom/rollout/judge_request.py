"""Which judge a request asks for; the fields are the same wherever rollouts are judged."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Annotated, Literal

import httpx
from pydantic import BaseModel, ConfigDict, Field

from stillroom.errors import InputError
from stillroom.rollout.judge import Judge, JudgeSees, ReplyFormat, rubric_text
from stillroom.rollout.matchers import AnswerMatch
from stillroom.settings import Workspace
from stillroom.teachers.budget import Budget
from stillroom.teachers.openai_http import CallSettings, OpenAITeacher, Spending
from stillroom.teachers.pricing import price_for
from stillroom.teachers.providers import endpoint_for
from stillroom.types import SampledTurn, SamplingSettings


class JudgeOptions(BaseModel):
    """How final answers are judged beside rewards.py: by comparing them, or by a model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    answer_match: Annotated[
        Literal["contained", "exact", "normalised", "numeric", "choice"],
        Field(description="How expected_answer is compared; a row's metadata.answer_match wins"),
    ] = "contained"
    judge_model: Annotated[
        str | None, Field(description="Model that judges by judge_rubric; none: no judge")
    ] = None
    judge_rubric: Annotated[
        str | None, Field(description="What makes an answer good: text, or a .md or .txt file")
    ] = None
    judge_provider: Literal[
        "openai", "openrouter", "anthropic", "google", "vllm", "sglang", "ollama"
    ] = "openai"
    judge_base_url: Annotated[str | None, Field(description="OpenAI-compatible endpoint")] = None
    judge_api_key_env: Annotated[
        str | None, Field(description="NAME of the environment variable with the key")
    ] = None
    judge_sees: Annotated[
        JudgeSees, Field(description="The final answer alone, or also the turns and tool replies")
    ] = "answer"
    judge_reply_format: Annotated[
        ReplyFormat, Field(description="What the endpoint can enforce; the reply is always checked")
    ] = "json_schema"
    judge_max_tokens: Annotated[int, Field(ge=64, description="Per reply")] = 1024

    @property
    def default_match(self) -> AnswerMatch:
        """How answers are compared where a row does not say it."""
        return AnswerMatch(self.answer_match)


def check_judge(workspace: Workspace, options: JudgeOptions) -> None:
    """Raises InputError for a judge that cannot work, before anything is spent."""
    if (options.judge_model is None) != (options.judge_rubric is None):
        missing = "judge_rubric" if options.judge_rubric is None else "judge_model"
        raise InputError(
            f"a judge needs judge_model and judge_rubric, and {missing} is missing",
            f"give {missing}, or leave both out",
        )
    if options.judge_rubric is None:
        return
    rubric_text(workspace, options.judge_rubric)
    endpoint_for(
        workspace,
        options.judge_provider,
        base_url=options.judge_base_url,
        api_key_env=options.judge_api_key_env,
    )


async def open_judge(
    stack: AsyncExitStack,
    workspace: Workspace,
    options: JudgeOptions,
    *,
    timeout_s: float,
    budget: Budget | None = None,
    on_turn: Callable[[SampledTurn], None] = lambda _turn: None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> Judge | None:
    """Returns the judge that was asked for; None if none was. Its calls count in the budget."""
    check_judge(workspace, options)
    if options.judge_model is None or options.judge_rubric is None:
        return None
    endpoint = endpoint_for(
        workspace,
        options.judge_provider,
        base_url=options.judge_base_url,
        api_key_env=options.judge_api_key_env,
    )
    teacher = await stack.enter_async_context(
        OpenAITeacher(
            endpoint,
            options.judge_model,
            SamplingSettings(temperature=0.0, max_tokens=options.judge_max_tokens),
            key=workspace.read_key(endpoint.api_key_env) if endpoint.api_key_env else None,
            calls=CallSettings(timeout_s=timeout_s),
            spending=Spending(price_for(workspace, options.judge_model), budget or Budget()),
            transport=transport,
        )
    )
    return Judge(
        teacher,
        rubric_text(workspace, options.judge_rubric),
        sees=options.judge_sees,
        reply_format=options.judge_reply_format,
        on_turn=on_turn,
    )
