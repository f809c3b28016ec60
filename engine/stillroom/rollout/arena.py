"""Setting up what rollouts need: the policy or teacher, the user's tools and rewards."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import httpx

from stillroom.data.formats import Task
from stillroom.errors import DataError, missing_extra
from stillroom.rollout.collect import Arena
from stillroom.rollout.loop import Policy
from stillroom.rollout.request import RolloutOptions, locate_policy, user_file
from stillroom.rollout.rewards import Rewarder
from stillroom.settings import Workspace
from stillroom.teachers.limits import LimitSettings
from stillroom.teachers.openai_http import OpenAITeacher
from stillroom.teachers.providers import IN_PROCESS, endpoint_for
from stillroom.tools.user_pool import UserPool
from stillroom.types import SamplingSettings, TeacherRecord

DEMO_TEACHER = "demo/teacher"


@asynccontextmanager
async def open_arena(
    workspace: Workspace,
    options: RolloutOptions,
    sampling: SamplingSettings,
    tasks: Sequence[Task],
    *,
    transport: httpx.AsyncBaseTransport | None = None,
) -> AsyncGenerator[Arena]:
    """Gives everything the tasks' rollouts share, and closes it again.

    Raises DataError if a task names a tool or reward that the user's files do not have.
    """
    async with AsyncExitStack() as stack:
        pool = await open_user_pool(
            stack,
            tools_file=user_file(workspace, options.tools, what="tools"),
            rewards_file=user_file(workspace, options.rewards, what="rewards"),
            tool_timeout_s=options.tool_timeout,
        )
        check_tools(tasks, pool)
        rewarder = Rewarder(pool)
        rewarder.check(tasks)
        policy = await _open_policy(stack, workspace, options, sampling, transport)
        teacher = TeacherRecord(provider=options.provider, model=options.model, settings=sampling)
        width = _width_of(policy)
        yield Arena(policy, teacher, pool, rewarder, options.max_turns, width=width)


async def open_user_pool(
    stack: AsyncExitStack,
    *,
    tools_file: Path | None,
    rewards_file: Path | None,
    tool_timeout_s: float,
    reward_timeout_s: float = 60.0,
) -> UserPool | None:
    """Starts the process for the user's files; None if there are none."""
    if tools_file is None and rewards_file is None:
        return None
    pool = UserPool(
        tools_file=tools_file,
        rewards_file=rewards_file,
        tool_timeout_s=tool_timeout_s,
        reward_timeout_s=reward_timeout_s,
    )
    return await stack.enter_async_context(pool)


def check_tools(tasks: Sequence[Task], pool: UserPool | None) -> None:
    """Raises DataError if a task names a tool that does not exist."""
    known = {schema["function"]["name"] for schema in pool.schemas} if pool else set[str]()
    for task in tasks:
        unknown = set(task.tool_names or ()) - known
        if unknown:
            has = f"tools.py has: {', '.join(sorted(known))}" if known else "no tools file is given"
            raise DataError(
                f"task {task.task_id} names the tool {min(unknown)!r}, but {has}",
                "give the file with `tools`, or take the name out of the row's 'tools'",
            )


def _width_of(policy: Policy) -> Callable[[], int]:
    """Returns how many conversations a policy could take: behind an endpoint it is learnt."""
    if isinstance(policy, OpenAITeacher):
        limiter = policy.limiter
        return lambda: limiter.window
    return lambda: 0


async def _open_policy(
    stack: AsyncExitStack,
    workspace: Workspace,
    options: RolloutOptions,
    sampling: SamplingSettings,
    transport: httpx.AsyncBaseTransport | None,
) -> Policy:
    if options.provider not in IN_PROCESS:
        endpoint = endpoint_for(
            options.provider, base_url=options.base_url, api_key_env=options.api_key_env
        )
        return await stack.enter_async_context(
            OpenAITeacher(
                endpoint,
                options.model,
                sampling,
                timeout_s=options.request_timeout,
                limits=LimitSettings(start=options.concurrency, most=options.most_at_once),
                transport=transport,
            )
        )
    location = locate_policy(workspace, options)
    try:
        from stillroom.models.heads import OutputHead
        from stillroom.models.load import load_model
        from stillroom.policy.check import check_decoding
        from stillroom.policy.hf import HFPolicy
    except ModuleNotFoundError as error:
        raise missing_extra("train", f"running {options.model!r} in-process") from error
    loaded = await anyio.to_thread.run_sync(load_model, workspace, location)
    OutputHead(loaded.model).check()
    check_decoding(loaded)
    return await stack.enter_async_context(HFPolicy(loaded, sampling, max_rows=options.concurrency))
