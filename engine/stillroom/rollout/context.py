"""Opens what the rollouts of a run share: the policy or teacher, the tools and the rewards."""

import functools
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import anyio
import msgspec

from stillroom.data.formats import Task
from stillroom.errors import DataError, missing_extra
from stillroom.models.chat_template import TemplateSource
from stillroom.models.resolve import ModelLocation
from stillroom.rollout.episode.collect import RolloutContext
from stillroom.rollout.episode.loop import (
    Policy,
    PolicyConversation,
    TurnRules,
    cut_at_characters,
    tool_task,
)
from stillroom.rollout.forecast import FRAME_TOKENS, TEMPLATE_TOKENS
from stillroom.rollout.plan import RolloutPlan, ToolsPlan
from stillroom.rollout.refine_plan import CriticPlan, FailedRollouts
from stillroom.rollout.refining import Critic, RefiningPolicy
from stillroom.rollout.rewards.judge_plan import open_judge
from stillroom.rollout.rewards.matchers import AnswerMatch
from stillroom.rollout.rewards.rewards import Rewarder
from stillroom.secrecy.environments import PASSIVE_THREADS
from stillroom.serving.model_server import fit_max_tokens
from stillroom.teachers.budget import Budget, Cost
from stillroom.teachers.endpoint.client import CallSettings, OpenAITeacher, Spending
from stillroom.teachers.limits.limit_types import LimitSettings, LimitUnit
from stillroom.teachers.providers import Endpoint
from stillroom.tools.browser.tool import BrowseTools, PlaywrightNames
from stillroom.tools.containers import MCP_PORT, PLAYWRIGHT, DockerTools
from stillroom.tools.mcp.servers import MCPTools
from stillroom.tools.mcp.spec import is_local_port
from stillroom.tools.source import CombinedTools, RedactedTools, ToolSource
from stillroom.tools.user.file import UserFile
from stillroom.tools.user.pool import UserPool
from stillroom.types import (
    Message,
    SampledTurn,
    SamplingSettings,
    TeacherRecord,
    TokenTrace,
    ToolSchema,
)


@dataclass(frozen=True, slots=True)
class ToolsAndRewards:
    """The open tools of a run, and the process that computes its rewards."""

    pool: UserPool | None
    """The process that runs the user's tools.py and rewards.py; None if there is neither."""
    tools: ToolSource | None
    """All tools as one source; None if there are none."""
    notes: Sequence[str]
    """Notes on the tools for the user, e.g. that container images must be pulled."""


@asynccontextmanager
async def open_tools_and_rewards(
    plan: ToolsPlan, tasks: Sequence[Task]
) -> AsyncGenerator[ToolsAndRewards]:
    """Starts the processes and connections that the tasks' tools and rewards need.

    They are closed again when the block ends. No tool is called here.
    Raises DataError if a task names a tool that does not exist.
    """
    async with AsyncExitStack() as stack:
        pool = await open_user_pool(
            stack,
            tools_file=plan.tools_file,
            rewards_file=plan.rewards_file,
            tool_timeout_s=plan.options.tool_timeout,
            reward_timeout_s=plan.options.reward_timeout,
        )
        sources = _ToolSources(plan, tasks)
        tools = await stack.enter_async_context(sources.open(pool))
        if tools is not None:
            tools = RedactedTools(tools, plan.redactor)
        _check_tools(tasks, tools)
        notes = [*(pool.notes if pool is not None else ()), *sources.notes]
        yield ToolsAndRewards(pool, tools, notes)


async def open_rewarder(
    stack: AsyncExitStack,
    plan: RolloutPlan,
    tasks: Sequence[Task],
    pool: UserPool | None,
    *,
    budget: Budget | None = None,
) -> Rewarder:
    """Opens the judge and returns the tasks' rewarder; judge calls count against the budget.

    Raises DataError if a task names a reward that does not exist.
    """
    judge = await open_judge(
        stack,
        plan.workspace,
        plan.judge,
        timeout_s=plan.options.request_timeout,
        budget=budget,
    )
    rewarder = Rewarder(pool, judge=judge, match=AnswerMatch(plan.options.answer_match))
    rewarder.check(tasks)
    return rewarder


@asynccontextmanager
async def open_rollout_context(
    plan: RolloutPlan,
    sampling: SamplingSettings,
    tasks: Sequence[Task],
    *,
    spending: Spending | None = None,
    failed: FailedRollouts | None = None,
) -> AsyncGenerator[RolloutContext]:
    """Opens everything that the tasks' rollouts share, and closes it when the block ends.

    `failed` are the rollouts of a student that are refined, if any.

    Raises DataError if a task names a tool or reward that the user's files do not have.
    """
    options = plan.options
    async with AsyncExitStack() as stack:
        opened = await stack.enter_async_context(open_tools_and_rewards(plan, tasks))
        budget = spending.budget if spending else None
        rewarder = await open_rewarder(stack, plan, tasks, opened.pool, budget=budget)
        notes = [*opened.notes]
        if isinstance(plan.policy, Endpoint):
            key = plan.workspace.read_key(plan.policy.api_key_env)
            tools = opened.tools.schemas if opened.tools is not None else ()
            fitted = await fit_max_tokens(plan.policy, options.model, sampling, tools, key=key)
            sampling, notes = fitted.sampling, [*notes, *fitted.notes]
            if not plan.policy.takes_temperature(options.model):
                notes.append(f"{options.model} takes no temperature and no top_p: it uses its own")
        models = _Models(stack, plan, spending, notes, has_tools=opened.tools is not None)
        policy = await models.open_policy(sampling)
        concurrency_limit, metrics = _limit_and_metrics(policy)
        refiner = await models.open_refiner(policy, failed)
        max_characters = options.max_tool_response
        yield RolloutContext(
            refiner or policy,
            TeacherRecord(
                provider=options.provider,
                model=options.model,
                settings=sampling,
                chat_template=options.chat_template,
            ),
            opened.tools,
            rewarder,
            TurnRules.of(options),
            cut_reply=cut_at_characters(max_characters) if max_characters is not None else None,
            timeout_s=options.rollout_timeout,
            notes=notes,
            concurrency_limit=concurrency_limit,
            metrics=metrics,
            refiner=refiner,
        )


async def open_user_pool(
    stack: AsyncExitStack,
    *,
    tools_file: UserFile | None,
    rewards_file: UserFile | None,
    tool_timeout_s: float,
    reward_timeout_s: float,
) -> UserPool | None:
    """Starts the process that runs the user's Python files, or returns None if there are none."""
    if tools_file is None and rewards_file is None:
        return None
    pool = UserPool(
        tools_file=tools_file,
        rewards_file=rewards_file,
        tool_timeout_s=tool_timeout_s,
        reward_timeout_s=reward_timeout_s,
    )
    return await stack.enter_async_context(pool)


def _check_tools(tasks: Sequence[Task], tools: ToolSource | None) -> None:
    """Raises DataError if a task names a tool that does not exist."""
    names = {schema["function"]["name"] for schema in tools.schemas} if tools else set[str]()
    for task in tasks:
        unknown = set(task.tool_names or ()) - names
        if unknown:
            known = f"the tools are: {', '.join(sorted(names))}" if names else "no tools are given"
            raise DataError(
                f"task {task.task_id} names the unknown tool {min(unknown)!r}; {known}",
                "pass the file that defines it as `tools`, or remove the name from the row's "
                "'tools'",
            )


def _limit_and_metrics(policy: Policy) -> tuple[Callable[[], int], Callable[[], dict[str, float]]]:
    """Returns a function for the policy's current concurrency limit, and one for its metrics.

    Both change as the run adapts to an endpoint's rate limits; a model in this process has neither.
    """
    if not isinstance(policy, OpenAITeacher):
        return lambda: 0, dict[str, float]
    limiter = policy.limiter

    def metrics() -> dict[str, float]:
        pace = {}
        if limiter.pace is not None:
            unit = "calls" if limiter.unit is LimitUnit.REQUESTS else "tokens"
            pace[f"{unit}_per_s_allowed"] = round(limiter.pace, 2)
        return {"at_once_allowed": float(limiter.window), **pace}

    # A quarter more than the allowed calls, since some conversations are waiting for their tools.
    return lambda: limiter.window + limiter.window // 4, metrics


@dataclass(frozen=True, slots=True)
class _Models:
    """Opens the models of a run: clients of endpoints, or models loaded into this process."""

    stack: AsyncExitStack
    plan: RolloutPlan
    spending: Spending | None
    """The run's budget and the price of the policy's tokens."""
    notes: list[str]
    """Notes for the user, e.g. that a model can only be sampled more slowly."""
    has_tools: bool

    async def open_policy(self, sampling: SamplingSettings) -> Policy:
        """Opens the run's policy."""
        options, location = self.plan.options, self.plan.policy
        if isinstance(location, ModelLocation):
            return await self._load_local(location, sampling, self.plan.template)
        calls = CallSettings(
            timeout_s=options.request_timeout,
            limits=LimitSettings(
                initial_in_flight=options.concurrency, max_in_flight=options.highest_concurrency
            ),
            sends_thinking_back=options.include_thinking,
        )
        return await self._open_endpoint(location, options.model, sampling, calls, self.spending)

    async def open_refiner(
        self, teacher: Policy, failed: FailedRollouts | None
    ) -> RefiningPolicy | None:
        """Opens the student and the critic of a refinement, whose calls count against the budget.

        None if the rollouts begin at the prompts.
        """
        refine = self.plan.refine
        if refine is None or failed is None or not refine.options.replays_student:
            return None
        student = critic = None
        if refine.student is not None and refine.student_record is not None:
            student = await self._load_local(
                refine.student, refine.student_record.settings, refine.student_template
            )
        if refine.options.takeover == "critic":
            critic = Critic(await self._open_critic(refine.critic) if refine.critic else teacher)
        return RefiningPolicy(teacher, failed, refine.options, student=student, critic=critic)

    async def _open_critic(self, critic: CriticPlan) -> Policy:
        """Opens the model of critic.yml."""
        sampling = SamplingSettings(temperature=0.0, max_tokens=critic.file.max_tokens)
        if isinstance(critic.policy, ModelLocation):
            return await self._load_local(critic.policy, sampling)
        calls = CallSettings(timeout_s=self.plan.options.request_timeout)
        budget = self.spending.budget if self.spending else Budget()
        spending = Spending(critic.price, budget)
        return await self._open_endpoint(
            critic.policy, critic.file.model, sampling, calls, spending
        )

    async def _open_endpoint(
        self,
        endpoint: Endpoint,
        model: str,
        sampling: SamplingSettings,
        calls: CallSettings,
        spending: Spending | None,
    ) -> OpenAITeacher:
        """Opens a client of an endpoint."""
        key = self.plan.workspace.read_key(endpoint.api_key_env)
        teacher = OpenAITeacher(endpoint, model, sampling, key=key, calls=calls, spending=spending)
        return await self.stack.enter_async_context(teacher)

    async def _load_local(
        self,
        location: ModelLocation,
        sampling: SamplingSettings,
        template: TemplateSource | None = None,
    ) -> Policy:
        """Loads a model into this process; `template` replaces its own chat template."""
        options = self.plan.options
        # The process of a run is started with this variable; the process of a chat is not.
        os.environ.update(PASSIVE_THREADS)
        # Imported here because the server process checks requests with this package, without torch.
        try:
            from stillroom.models.lm_head import HeadRunner
            from stillroom.models.load import include_tools, load_model
            from stillroom.policy.check import check_decoding
            from stillroom.policy.hf import HFPolicy
        except ModuleNotFoundError as error:
            raise missing_extra("train", f"running {options.model!r} in-process") from error
        load = functools.partial(load_model, self.plan.workspace, location, template=template)
        loaded = await anyio.to_thread.run_sync(load)
        if self.has_tools and template is None:
            self.notes.extend(include_tools(loaded))
        HeadRunner(loaded.model).check()
        self.notes.extend(check_decoding(loaded))
        policy = HFPolicy(loaded, sampling, max_rows=options.concurrency)
        opened = await self.stack.enter_async_context(policy)
        if self.spending is None:
            return opened
        return MeteredPolicy(opened, self.spending.budget, sampling.max_tokens)


@dataclass(frozen=True, slots=True)
class MeteredPolicy:
    """A policy in this process whose turns count against a budget, as an endpoint's calls do.

    A turn is sampled only if its worst-case number of tokens is within the budget.
    """

    policy: Policy
    budget: Budget
    max_tokens: int
    """The maximum number of tokens that one turn may sample."""

    @asynccontextmanager
    async def converse(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, seed_key: str
    ) -> AsyncGenerator["MeteredConversation"]:
        """Opens a conversation that begins with the given messages."""
        async with self.policy.converse(messages, tools, seed_key=seed_key) as conversation:
            # A token is at least one byte, so the bytes bound the tokens without a tokenizer.
            max_prompt_tokens = _num_bytes([messages, tools]) + TEMPLATE_TOKENS
            yield MeteredConversation(self, conversation, max_prompt_tokens)


class MeteredConversation:
    """A conversation that reserves the worst case of each turn in the budget before sampling it."""

    def __init__(
        self, meter: MeteredPolicy, conversation: PolicyConversation, max_prompt_tokens: int
    ) -> None:
        self._meter, self._conversation = meter, conversation
        # The maximum number of tokens of the next prompt.
        self._max_prompt_tokens = max_prompt_tokens

    async def sample(self) -> SampledTurn:
        """Returns the next turn. Raises BudgetSpentError if it might exceed the budget."""
        budget = self._meter.budget
        worst = Cost(self._max_prompt_tokens + self._meter.max_tokens)
        await budget.reserve(worst)
        try:
            turn = await self._conversation.sample()
        except BaseException:
            # An unfinished turn costs nothing, since a model in this process is not billed.
            budget.release(worst)
            raise
        budget.settle(worst, Cost.of(turn.usage, turn.cost_usd), was_sent=False)
        self._set_max_prompt_tokens(turn)
        return turn

    def add_responses(self, turn: Message, responses: Sequence[Message]) -> None:
        """Appends the tool results, or a user's message, that follow the last turn."""
        self._max_prompt_tokens += _num_bytes(responses) + FRAME_TOKENS
        self._conversation.add_responses(turn, responses)

    def restore(self, turn: SampledTurn) -> None:
        """Appends a turn that was sampled earlier."""
        self._conversation.restore(turn)
        self._set_max_prompt_tokens(turn)

    def trace(self) -> TokenTrace | None:
        """Returns the exact tokens of the conversation, if the policy knows them."""
        return self._conversation.trace()

    def _set_max_prompt_tokens(self, turn: SampledTurn) -> None:
        """Sets the maximum number of tokens of the next prompt, from the usage of the last turn."""
        usage = turn.usage
        self._max_prompt_tokens = usage.prompt_tokens + usage.completion_tokens + FRAME_TOKENS


def _num_bytes(value: object) -> int:
    return len(msgspec.json.encode(value))


class _ToolSources:
    """All sources of a run's tools: tools.py, MCP servers, the browser and containers.

    Once they are open, `notes` holds notes on the tools for the user.
    """

    def __init__(self, plan: ToolsPlan, tasks: Sequence[Task]) -> None:
        self._plan, self._options = plan, plan.options
        # Sources need only the tasks with a container; all tasks might not fit in memory.
        self._tasks = [tool_task(task) for task in tasks if task.docker]
        self.notes: list[str] = []

    @asynccontextmanager
    async def open(self, pool: UserPool | None) -> AsyncGenerator[ToolSource | None]:
        """Opens all tools as one source, or yields None if there are none; `pool` is already open.

        Raises InputError if two tools have the same name, and whatever a source raises.
        """
        sources: dict[str, ToolSource] = {}
        async with AsyncExitStack() as stack:
            if pool is not None and pool.schemas and self._plan.tools_file is not None:
                name = self._plan.workspace.shown(self._plan.tools_file.path)
                sources[name] = pool
            for server in self._external_servers():
                tools = await stack.enter_async_context(
                    MCPTools(
                        self._plan.workspace.restore_command(server),
                        tool_timeout_s=self._options.tool_timeout,
                        folder=self._plan.workspace.root,
                    )
                )
                sources[tools.name] = tools
            browser = await self._open_browser(stack)
            if browser is not None and self._options.browse:
                sources["the browser"] = browser
            if self._tasks:
                fallback = PlaywrightNames(browser) if browser is not None else None
                containers = await stack.enter_async_context(self._containers(fallback))
                sources["the rows' containers"] = containers
                self.notes += containers.notes
            if len(sources) > 1:
                yield CombinedTools(sources)
            else:
                yield next(iter(sources.values()), None)

    def _external_servers(self) -> list[str]:
        """Returns the MCP servers except the one that runs in the rows' containers.

        Other systems' configurations name that server localhost:8931; the containers supply its
        tools.
        """
        servers = self._plan.mcp_servers
        inside = {server for server in servers if self._tasks and is_local_port(server, MCP_PORT)}
        self.notes += [
            f"MCP server {server} is treated as the one in the rows' containers; for a server on "
            f"this machine write http://{server}/mcp"
            for server in sorted(inside)
        ]
        return [server for server in servers if server not in inside]

    async def _open_browser(self, stack: AsyncExitStack) -> BrowseTools | None:
        """Opens the browser if the options ask for it or a task needs it; else returns None."""
        is_fallback = any(task.docker == PLAYWRIGHT for task in self._tasks)
        if not (self._options.browse or is_fallback):
            return None
        browser = BrowseTools(
            allow=self._options.browse_allow, call_timeout_s=self._options.tool_timeout
        )
        return await stack.enter_async_context(browser)

    def _containers(self, fallback: ToolSource | None) -> DockerTools:
        """Returns the tools of the containers, not yet open."""
        return DockerTools(
            self._tasks,
            folder=self._plan.workspace.root,
            # A run that is started again has the same id, so it finds and removes the containers
            # that a kill left behind.
            run_id=self._plan.identity,
            fallback=fallback,
            tool_timeout_s=self._options.tool_timeout,
        )
