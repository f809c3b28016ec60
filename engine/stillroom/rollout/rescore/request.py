"""The request to score finished rollouts again, and its plan, checked before anything is spent."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from stillroom.errors import InputError
from stillroom.outputs import ReplacingRequest, check_replaceable
from stillroom.rollout.plan import user_file
from stillroom.rollout.request import NO_FILE, JudgeOptions
from stillroom.rollout.rewards.judge_plan import JudgePlan, plan_judge
from stillroom.rollout.sources import check_output
from stillroom.settings import Workspace
from stillroom.teachers.model_choice import ModelChoice
from stillroom.teachers.providers import Endpoint
from stillroom.tools.user.file import UserFile
from stillroom.validation import PlacedRequest


class ScoreRollouts(PlacedRequest, JudgeOptions, ReplacingRequest):
    """The request for new rewards of finished rollouts; the teacher is not called again."""

    input: Annotated[str, Field(description="Rollouts file or folder; also of rnow or NeMo Gym")]
    output: Annotated[str, Field(description="The same rows with new rewards")]
    rewards: Annotated[
        str,
        Field(description="Python file with @reward functions, or none"),
    ] = NO_FILE
    seed: int | None = None
    concurrency: Annotated[int, Field(ge=1, le=4096, description="Rollouts judged at once")] = 20
    reward_timeout: Annotated[float, Field(gt=0)] = 60.0
    request_timeout: Annotated[float, Field(gt=0, description="Seconds per judge call")] = 120.0
    budget_usd: Annotated[
        float | None, Field(gt=0, description="Cap of this output, reruns included")
    ] = None


@dataclass(frozen=True, slots=True)
class ScoringPlan:
    """A checked `ScoreRollouts`, with the files that it names."""

    source: Path
    output: Path
    rewards: UserFile | None
    judge: JudgePlan | None

    @property
    def models_called(self) -> list[tuple[ModelChoice, Endpoint]]:
        """The models that the run calls, each with its endpoint: the judge if there is one."""
        return [] if self.judge is None else [(self.judge.file, self.judge.endpoint)]

    @property
    def inputs(self) -> list[Path]:
        """The rollouts, and the files that decide how they are judged."""
        rewards = self.rewards.paths if self.rewards is not None else []
        return [self.source, *rewards, *(self.judge.inputs if self.judge is not None else [])]


def plan_scoring(workspace: Workspace, request: ScoreRollouts) -> ScoringPlan:
    """Checks a scoring request and returns its plan.

    Raises InputError for every error that can be found before anything is spent.
    """
    source = workspace.existing(request.input, label="input")
    output = workspace.output_file(request.output, label="output")
    rewards = user_file(workspace, request.rewards, kind="rewards")
    judge = plan_judge(workspace, request.judge)
    if request.budget_usd is not None:
        if judge is None:
            raise InputError(
                "budget_usd limits the judge's cost, but no judge is given",
                "leave out budget_usd, or give judge=judge.yml",
            )
        # Called for its InputError, which says where to write the price.
        judge.file.price(workspace, is_needed=True)
    check_output(output, [source])
    check_replaceable(output, overwrite=request.overwrite)
    return ScoringPlan(source, output, rewards, judge)
