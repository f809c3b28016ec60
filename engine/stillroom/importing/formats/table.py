"""The table of all formats that can be imported."""

from stillroom.importing.formats.api_logs.batches import ANTHROPIC_BATCH, OPENAI_BATCH
from stillroom.importing.formats.api_logs.gateways import HELICONE, LITELLM
from stillroom.importing.formats.api_logs.logged_pairs import (
    ANTHROPIC_MESSAGES,
    GEMINI,
    OPENAI_CHAT,
    OPENAI_RESPONSES,
)
from stillroom.importing.formats.api_logs.recorded import STILLROOM_RECORD
from stillroom.importing.formats.api_logs.stored_completions import STORED_COMPLETIONS
from stillroom.importing.formats.datasets.conversations import (
    ALPACA,
    EVAL_ITEMS,
    FINE_TUNING,
    PREFERENCES,
    SHAREGPT,
    TRL_PREFERENCES,
)
from stillroom.importing.formats.datasets.tables import CSV, PAIRS, PARQUET
from stillroom.importing.formats.evaluations.environments import (
    EPISODES,
    NEMO_GYM,
    RESULTS,
    RNOW,
    ROLLOUTS,
)
from stillroom.importing.formats.evaluations.inspect_ai import INSPECT_AI
from stillroom.importing.formats.observability.langfuse import LANGFUSE
from stillroom.importing.formats.observability.langsmith import LANGSMITH
from stillroom.importing.formats.observability.spans import (
    OPENINFERENCE_SPANS,
    OPENROUTER,
    OTEL_GENAI,
    PHOENIX,
    SPAN_TABLE,
)
from stillroom.importing.formats.sessions.atif import ATIF
from stillroom.importing.formats.sessions.claude_code import CLAUDE_CODE, CLAUDE_CODE_OUTPUT
from stillroom.importing.formats.sessions.codex import CODEX, CODEX_EXEC
from stillroom.importing.formats.sessions.openai_agents import OPENAI_AGENTS
from stillroom.importing.formats.sessions.openhands import OPENHANDS
from stillroom.importing.formats.sessions.swe_agent import SWE_AGENT
from stillroom.importing.records import TraceFormat

FORMATS: tuple[TraceFormat, ...] = (
    STILLROOM_RECORD,
    ROLLOUTS,
    CLAUDE_CODE,
    CLAUDE_CODE_OUTPUT,
    INSPECT_AI,
    RESULTS,
    EPISODES,
    RNOW,
    NEMO_GYM,
    CODEX,
    ATIF,
    SWE_AGENT,
    OPENHANDS,
    OPENAI_AGENTS,
    CODEX_EXEC,
    ANTHROPIC_MESSAGES,
    OPENAI_RESPONSES,
    GEMINI,
    OPENAI_BATCH,
    ANTHROPIC_BATCH,
    OPENAI_CHAT,
    OPENINFERENCE_SPANS,
    OPENROUTER,
    OTEL_GENAI,
    PHOENIX,
    SPAN_TABLE,
    LANGFUSE,
    LANGSMITH,
    LITELLM,
    HELICONE,
    STORED_COMPLETIONS,
    PREFERENCES,
    TRL_PREFERENCES,
    EVAL_ITEMS,
    SHAREGPT,
    ALPACA,
    FINE_TUNING,
    PARQUET,
    CSV,
    PAIRS,
)
"""All formats. The first that recognises a file reads it, so specific formats come first."""
