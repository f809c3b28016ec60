"""The rollout section of config.yml: how the student is sampled (distill)."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stillroom.data.chat.reasoning import ReasoningMode
from stillroom.rollout.request import DEFAULT_NUDGE, TerminationPolicy


class StudentServerSection(BaseModel):
    """A vLLM server that samples the student (distill)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_url: str
    """It serves the student's base, with --enable-lora, and reads the run's folder."""
    api_key_env: str | None = None
    """Name of the environment variable with its key; default: no key is sent."""
    timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that it may take for one turn."""


class RolloutSection(BaseModel):
    """How the student is sampled (distill)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_turns: Annotated[int, Field(ge=1, le=1000)] = 1
    max_tokens: Annotated[int, Field(ge=1)] = 2048
    max_context_window: Annotated[int, Field(ge=16)] = 32768
    mcp_url: str | tuple[str, ...] | None = None
    """More tools: MCP servers beside tools.py, each a URL or a command line."""
    max_tool_response: Annotated[int, Field(ge=1)] | None = None
    """Tokens of a tool's reply; the rest is cut, with a mark that the model reads."""
    browse: bool = False
    """More tools: a web browser, which opens public addresses only."""
    browse_allow: tuple[str, ...] = ()
    """Private hosts (host:port, CIDR) that the browser may open too."""
    reasoning_mode: ReasoningMode | None = None
    """Asks the student's chat template to let it think or not; None: as the template does."""
    termination_policy: TerminationPolicy = "last_tool"
    """The rollout ends with the first turn that calls no tool, or only after max_turns turns."""
    nudge: Annotated[str, Field(min_length=1)] = DEFAULT_NUDGE
    """termination_policy max_turns: what the user says after a turn that calls no tool."""
    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    tool_timeout: Annotated[float, Field(gt=0)] = 60.0
    reward_timeout: Annotated[float, Field(gt=0)] = 60.0
    rollout_timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds of a rollout with its rewards; one that takes longer is not trained on."""
    include_thinking: bool = False
    concurrency: Annotated[int, Field(ge=1, le=4096)] = 64
    """Conversations in the running batch."""
    server: StudentServerSection | None = None
    """Samples the student instead of this process; each iteration's adapter is loaded there."""
    max_staleness: Annotated[int, Field(ge=0, le=16)] = 0
    """Iterations over which a rollout may go on; what takes longer is dropped and counted.

    0: every token is of the weights that are updated. Source: arXiv 2505.24298 (AReaL).
    """
    stragglers: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """max_staleness: the share of an iteration's rollouts that are not waited for."""

    @property
    def mcp_servers(self) -> tuple[str, ...]:
        """The MCP servers that tools come from."""
        return (self.mcp_url,) if isinstance(self.mcp_url, str) else self.mcp_url or ()

    @model_validator(mode="after")
    def _nudge_is_said(self) -> "RolloutSection":
        if self.nudge != DEFAULT_NUDGE and self.termination_policy == "last_tool":
            raise ValueError("nudge is said only with termination_policy: max_turns")
        return self

    @model_validator(mode="after")
    def _hosts_are_for_the_browser(self) -> "RolloutSection":
        if self.browse_allow and not self.browse:
            raise ValueError("browse_allow is for the browser: set browse: true, or leave it out")
        return self
