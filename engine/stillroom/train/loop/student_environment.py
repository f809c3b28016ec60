"""The student's environment during training: its tools, rewards and sampling settings.

A vLLM server may sample the student; it then loads each iteration's adapter under a new name.
"""

import secrets
import shutil
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio

from stillroom.data.chat.template import reasoning_variables
from stillroom.data.formats import Task
from stillroom.data.instruction import UNCHANGED, PromptViews
from stillroom.errors import CallFailedError, RunError, TeacherError
from stillroom.models.load import LoadedModel
from stillroom.models.multimodal import convert_to_multimodal, multimodal_config
from stillroom.places import make_folder, rename_folder
from stillroom.policy.hf import HFPolicy
from stillroom.rollout.context import open_tools_and_rewards
from stillroom.rollout.episode.collect import RolloutContext
from stillroom.rollout.episode.loop import CutText, Policy, TurnRules, cut_at_tokens
from stillroom.rollout.plan import ToolsPlan
from stillroom.rollout.rewards.rewards import Rewarder
from stillroom.serving.model_server import (
    ModelServerClient,
    NotServedError,
    ServerSettings,
    vllm_lora_rank,
)
from stillroom.serving.policy import ServedPolicy
from stillroom.settings import Workspace
from stillroom.teachers.providers import endpoint_for
from stillroom.tools.source import ToolSource
from stillroom.train.config.distill_sections import RolloutSection
from stillroom.train.config.request import TrainingPlan
from stillroom.train.config.schema import TrainConfig
from stillroom.train.student.model import Student
from stillroom.types import SamplingSettings, TeacherRecord


@dataclass(frozen=True, slots=True)
class StudentEnvironment:
    """The tools, rewards and settings that all rollouts of the student share during a run."""

    student: Student
    rollout: RolloutSection
    tools: ToolSource | None
    rewarder: Rewarder
    variables: Mapping[str, Any]
    """The chat template's variables, such as a reasoning mode."""
    cut_reply: CutText | None
    """Truncates a tool's reply; None: no limit."""
    notes: Sequence[str]
    """Notes about the tools, for the user."""
    server: ModelServerClient | None = None
    """The server that samples the student; None: sampled in this process."""
    views: PromptViews = UNCHANGED
    """The student's and the teacher's views of a prompt."""

    def policy(
        self,
        sampling: SamplingSettings,
        *,
        num_rollouts: int,
        pass_lock: anyio.Lock | None = None,
        model: LoadedModel | None = None,
    ) -> HFPolicy:
        """Returns a policy that samples the student with its current weights.

        model: the model to sample in place of the student (the teacher, in a curriculum).
        pass_lock: a lock shared by several policies, so that one forward pass runs at a time.
        """
        self.student.module.eval()
        return HFPolicy(
            model or self.student.loaded,
            sampling,
            max_rows=min(self.rollout.concurrency, num_rollouts),
            max_context=self.rollout.max_context_window,
            include_thinking=self.rollout.include_thinking,
            variables=self.variables,
            sampling_lock=pass_lock,
        )

    def rollout_context(
        self, policy: Policy, teacher: TeacherRecord, *, max_turns: int | None = None
    ) -> RolloutContext:
        """Returns the context of rollouts by `policy`; `teacher` is the sampled model's record."""
        rules = TurnRules.of(self.rollout)
        return RolloutContext(
            policy,
            teacher,
            self.tools,
            self.rewarder,
            replace(rules, max_turns=max_turns or rules.max_turns),
            cut_reply=self.cut_reply,
            timeout_s=self.rollout.rollout_timeout,
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
        open_tools_and_rewards(tools_plan, tasks) as opened,
        server or nullcontext(),
    ):
        rewarder = Rewarder(opened.pool)
        rewarder.check(tasks, is_judge_optional=is_judge_optional)
        yield StudentEnvironment(
            student,
            rollout,
            opened.tools,
            rewarder,
            variables,
            cut_at_tokens(tokenizer, max_reply) if max_reply is not None else None,
            opened.notes,
            server,
            plan.views,
        )


_UNLOAD_TIMEOUT_S = 10.0


def student_server(workspace: Workspace, config: TrainConfig) -> ModelServerClient | None:
    """Returns the client of the server that samples the student; None if this process samples it.

    Raises InputError if the server's key is missing.
    """
    section = config.rollout.server
    if section is None:
        return None
    endpoint = endpoint_for(
        workspace, "vllm", base_url=section.base_url, api_key_env=section.api_key_env
    )
    return ModelServerClient(
        endpoint,
        key=workspace.read_key(endpoint.api_key_env),
        settings=ServerSettings(config.rollout.concurrency, section.timeout),
    )


@asynccontextmanager
async def open_served_student(
    server: ModelServerClient,
    student: Student,
    config: TrainConfig,
    sampling: SamplingSettings,
    *,
    run: Path,
    variables: Any = None,
) -> AsyncGenerator[ServedPolicy]:
    """Loads the student's current adapter into the server and yields the policy that samples it.

    Raises RunError if the server does not load the adapter.
    """
    name = f"{run.name}-{secrets.token_hex(4)}"
    folder = (run / "adapters" / name).absolute()
    await anyio.to_thread.run_sync(_write_adapter, student, folder)
    try:
        await _load_adapter(server, name, folder, rank=config.model.qlora_rank)
        try:
            yield ServedPolicy(
                server,
                name,
                student.loaded,
                sampling,
                max_context=min(student.loaded.max_context, config.rollout.max_context_window),
                include_thinking=config.rollout.include_thinking,
                variables=variables,
            )
        finally:
            with anyio.move_on_after(_UNLOAD_TIMEOUT_S, shield=True):
                await _unload_adapter(server, name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _load_adapter(server: ModelServerClient, name: str, folder: Path, *, rank: int) -> None:
    """Loads the adapter in a folder into the server, under `name`. Raises RunError if it fails."""
    body = {"lora_name": name, "lora_path": str(folder)}
    served_rank = vllm_lora_rank(rank) or rank
    try:
        await server.post("/v1/load_lora_adapter", body, lambda _response: None)
    except NotServedError as error:
        raise RunError(
            f"the server that samples the student does not load adapters: {error.problem}",
            "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora "
            f"--max-lora-rank {served_rank}",
        ) from error
    except CallFailedError as error:
        raise RunError(
            f"the server that samples the student did not load the adapter: {error}",
            f"start it with --enable-lora --max-lora-rank {served_rank}, on a machine that can "
            f"read {folder}",
        ) from error


async def _unload_adapter(server: ModelServerClient, name: str) -> None:
    """Removes an adapter from the server; a server that does not respond is ignored."""
    try:
        await server.post("/v1/unload_lora_adapter", {"lora_name": name}, lambda _response: None)
    except (CallFailedError, TeacherError):
        # The server has stopped, or has already removed the adapter.
        return


def _write_adapter(student: Student, folder: Path) -> None:
    """Writes the adapter to a temporary folder, then renames it, so that no server reads half."""
    temporary = folder.with_name(f".{folder.name}.partial")
    model: Any = student.module
    make_folder(temporary)
    model.save_pretrained(temporary, save_embedding_layers=False)
    if (config := multimodal_config(student.base)) is not None:
        # The server has the whole multimodal model.
        convert_to_multimodal(temporary, config.model_type)
    rename_folder(temporary, folder)
