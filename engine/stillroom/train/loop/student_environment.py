"""The student's environment during training: its tools, rewards and sampling settings."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import anyio

from stillroom.data.chat.template import reasoning_variables
from stillroom.data.formats import Task
from stillroom.data.instruction import UNCHANGED, PromptViews
from stillroom.models.load import LoadedModel
from stillroom.policy.hf import HFPolicy
from stillroom.rollout.context import open_tools_and_rewards
from stillroom.rollout.episode.collect import RolloutContext
from stillroom.rollout.episode.loop import CutText, Policy, cut_at_tokens
from stillroom.rollout.plan import ToolsPlan
from stillroom.rollout.rewards.rewards import Rewarder
from stillroom.serving.model_server import ModelServer
from stillroom.settings import Workspace
from stillroom.tools.source import ToolSource
from stillroom.train.config.distill_sections import RolloutSection
from stillroom.train.config.request import TrainingPlan
from stillroom.train.loop.student_server import student_server
from stillroom.train.student.model import Student
from stillroom.types import SamplingSettings, TeacherRecord


@dataclass(frozen=True, slots=True)
class StudentEnvironment:
    """The tools, rewards and settings that all rollouts of the student share over a whole run."""

    student: Student
    rollout: RolloutSection
    tools: ToolSource | None
    rewarder: Rewarder
    variables: Mapping[str, Any]
    """The chat template's variables beside the conversation, such as a reasoning mode."""
    cut_reply: CutText | None
    notes: Sequence[str]
    """Notes about the tools, for the user."""
    server: ModelServer | None = None
    """The server that samples the student; None: this process samples it."""
    views: PromptViews = UNCHANGED
    """What student and teacher read of a prompt."""

    def policy(
        self,
        sampling: SamplingSettings,
        *,
        num_rollouts: int,
        turns: anyio.Lock | None = None,
        instead: LoadedModel | None = None,
    ) -> HFPolicy:
        """Returns a policy that samples the student with its current weights.

        instead: a model that takes the student's place (the teacher, in a curriculum).
        turns: the lock that several policies share, so that one forward pass runs at a time.
        """
        self.student.module.eval()
        return HFPolicy(
            instead or self.student.loaded,
            sampling,
            max_rows=min(self.rollout.concurrency, num_rollouts),
            max_context=self.rollout.max_context_window,
            include_thinking=self.rollout.include_thinking,
            variables=self.variables,
            turns=turns,
        )

    def rollout_context(
        self, policy: Policy, teacher: TeacherRecord, *, max_turns: int | None = None
    ) -> RolloutContext:
        """Returns the context of rollouts by `policy`; their rows name that policy as `teacher`."""
        rollout = self.rollout
        return RolloutContext(
            policy,
            teacher,
            self.tools,
            self.rewarder,
            max_turns or rollout.max_turns,
            rollout.nudge_to_send,
            cut_reply=self.cut_reply,
            timeout_s=rollout.rollout_timeout,
        )


@asynccontextmanager
async def open_student_environment(
    workspace: Workspace,
    plan: TrainingPlan,
    student: Student,
    tasks: Sequence[Task],
    *,
    is_judge_optional: bool,
) -> AsyncGenerator[StudentEnvironment]:
    """Starts the processes of the student's tools and rewards, as set in config.yml's `rollout`.

    Raises:
        ConfigError: the chat template does not know `rollout.reasoning_mode`.
        DataError: a task names a tool or reward that does not exist.
        InputError: two sources of tools offer a tool of the same name.
    """
    rollout, tokenizer = plan.config.rollout, student.loaded.tokenizer
    variables = reasoning_variables(tokenizer.chat_template, rollout.reasoning_mode)
    max_reply = rollout.max_tool_response
    server = student_server(workspace, plan.config)
    tools_plan = ToolsPlan(
        workspace=workspace,
        options=rollout,
        model=plan.config.model.path,
        mcp_servers=rollout.mcp_servers,
        tools_file=plan.tools_file,
        rewards_file=plan.rewards_file,
    )
    async with (
        open_tools_and_rewards(tools_plan, tasks) as stage,
        server or nullcontext(),
    ):
        rewarder = Rewarder(stage.pool)
        rewarder.check(tasks, is_judge_optional=is_judge_optional)
        yield StudentEnvironment(
            student,
            rollout,
            stage.tools,
            rewarder,
            variables,
            cut_at_tokens(tokenizer, max_reply) if max_reply is not None else None,
            stage.notes,
            server,
            plan.views,
        )
