"""Which models can score tokens; needs no torch, so it is known before anything is loaded."""

import re

from stillroom.errors import ConfigError

OFF_POLICY_ROUTE = (
    "use it off-policy: generate_rollouts with this teacher, then filter_dataset, convert_rollouts "
    "and start_training with dataset_type sft"
)
"""What to do with a teacher that cannot score the student's tokens."""

_API_MODELS = re.compile(
    r"^(openai/|anthropic/|google/)?(gpt-[0-9]|chatgpt|o[0-9](-|$)|claude|gemini(-|$))",
    re.IGNORECASE,
)


def refuse_api_teacher(path: str) -> None:
    """Raises ConfigError for a teacher that cannot return the log-probability of given tokens."""
    if _API_MODELS.match(path):
        raise ConfigError(
            f"Unsupported teacher model {path!r}: distill needs the log-probability of every token "
            "the student wrote, and the APIs of OpenAI, Anthropic and Google do not give it",
            f"take an open-weight teacher with the student's tokenizer, or {OFF_POLICY_ROUTE}",
        )
