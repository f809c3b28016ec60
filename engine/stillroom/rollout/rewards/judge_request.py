"""The judge of a request: its options, the content of judge.yml, its plan, and how it is opened."""

from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from stillroom.errors import DocumentError
from stillroom.lineage import ModelRecord
from stillroom.rollout.rewards.judge import (
    AnswerJudge,
    JudgeSees,
    ReplyFormat,
    rubric_path,
    rubric_text,
)
from stillroom.rollout.rewards.matchers import AnswerMatch
from stillroom.secrecy.readable import unreadable
from stillroom.settings import Workspace
from stillroom.teachers.budget import Budget
from stillroom.teachers.endpoint.client import CallSettings, OpenAITeacher, Spending
from stillroom.teachers.pricing import FREE, Price, price_for
from stillroom.teachers.providers import PROFILES, Endpoint, endpoint_for, terms_of, with_provider
from stillroom.types import SamplingSettings
from stillroom.validation import StrictModel, describe_errors
from stillroom.yaml_text import read_yaml

_NO_JUDGE = "none"


class JudgeOptions(StrictModel):
    """How final answers are judged beside rewards.py: by comparing them, or by a model."""

    answer_match: Annotated[
        Literal["contained", "exact", "normalised", "numeric", "choice"],
        Field(description="How expected_answer is compared; metadata.answer_match wins"),
    ] = "contained"
    judge: Annotated[
        str, Field(description="judge.yml: a judging model and its rubric; or none")
    ] = _NO_JUDGE

    @property
    def default_match(self) -> AnswerMatch:
        """The way to compare answers of rows without an answer_match."""
        return AnswerMatch(self.answer_match)


class JudgeFile(StrictModel):
    """The content of judge.yml: a model that judges answers, and its rubric."""

    model: str
    rubric: str
    """The text that says what makes an answer good, or the name of a .md or .txt file with it."""
    provider: Literal["openai", "openrouter", "anthropic", "google", "vllm", "sglang", "ollama"] = (
        "openai"
    )
    base_url: str | None = None
    api_key_env: str | None = None
    """The name of the environment variable with the key."""
    sees: JudgeSees = "answer"
    """Whether the judge sees only the final answer, or also the turns and tool replies."""
    reply_format: ReplyFormat = "json_schema"
    """The reply format that the endpoint is asked to enforce; replies are checked in any case."""
    max_tokens: Annotated[int, Field(ge=64)] = 1024
    """The most tokens of one reply of the judge."""

    @model_validator(mode="before")
    @classmethod
    def _provider_by_name(cls, given: Any) -> Any:
        return with_provider(given)


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

    @property
    def record(self) -> ModelRecord:
        """The judging model as manifests record it."""
        return ModelRecord(
            role="judge",
            name=self.file.model,
            location=self.file.base_url or self.file.provider,
            terms=terms_of(self.file.provider, self.file.base_url),
        )


def plan_judge(
    workspace: Workspace, options: JudgeOptions, *, needs_key: bool = True
) -> JudgePlan | None:
    """Returns the plan of the judge that the options name, or None if they name none.

    Without `needs_key` the judge will not be asked, so its key need not be set.
    Raises InputError for a judge that cannot work, before anything is spent.
    """
    if options.judge == _NO_JUDGE:
        return None
    path = workspace.existing(options.judge, label="judge")
    file = _read(path)
    endpoint = endpoint_for(
        workspace,
        file.provider,
        base_url=file.base_url,
        api_key_env=file.api_key_env,
        needs_key=needs_key,
    )
    rubric_file = rubric_path(workspace, file.rubric)
    rubric = rubric_text(file.rubric, rubric_file)
    price = FREE if PROFILES[file.provider].is_local else price_for(workspace, file.model)
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
    teacher = await stack.enter_async_context(
        OpenAITeacher(
            endpoint,
            file.model,
            SamplingSettings(temperature=0.0, max_tokens=file.max_tokens),
            key=workspace.read_key(endpoint.api_key_env),
            calls=CallSettings(timeout_s=timeout_s),
            spending=Spending(plan.price, budget or Budget()),
        )
    )
    return AnswerJudge(teacher, file.rubric, sees=file.sees, reply_format=file.reply_format)


def _read(path: Path) -> JudgeFile:
    try:
        raw: Any = read_yaml(path.read_text(encoding="utf-8"))
        return JudgeFile.model_validate(raw)
    except ValidationError as error:
        problem = f"{path}: {describe_errors(error, JudgeFile)}"
    except (OSError, ValueError, yaml.YAMLError) as error:
        problem = unreadable(path, error)
    raise DocumentError(
        f"the judge {problem}", "write `model: …` and `rubric: what makes an answer good`"
    )
