"""The command that serves a model, decided from what is known of it."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from stillroom.serving.model_server import lora_rank

SENTINEL = "0123456789"
"""The argument of the tool call that a chat template is asked to write."""
PROBE_TOOL = "probe_tool"
_NUMBERS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

# From what a template writes before the argument to vLLM's name for the format.
_FORMATS: Sequence[tuple[str, re.Pattern[str]]] = (
    ("hermes", re.compile(r'<tool_call>\s*\{\s*"name":\s*"probe_tool",\s*"arguments":')),
    ("qwen3_coder", re.compile(r"<tool_call>\s*<function=probe_tool>")),
    ("glm45", re.compile(r"<tool_call>\s*probe_tool\s*<arg_key>")),
    ("mistral", re.compile(r"\[TOOL_CALLS\]\s*\[?\s*(\{[^}]*\"name\":\s*\")?probe_tool")),
    # The bars are full-width ones.
    ("deepseek_v3", re.compile(r"tool▁call▁begin\W>function<\Wtool▁sep\W>probe_tool")),
    ("deepseek_v31", re.compile(r"tool▁call▁begin\W>probe_tool<\Wtool▁sep\W>")),
    ("kimi_k2", re.compile(r"<\|tool_call_begin\|>\s*functions\.probe_tool")),
    ("openai", re.compile(r"to=functions\.probe_tool")),
    ("llama3_json", re.compile(r'\{\s*"name":\s*"probe_tool",\s*"parameters":')),
)


@dataclass(frozen=True, slots=True)
class Served:
    """The facts about a model that its serving command depends on."""

    path: str
    name: str
    precision: str
    max_length: int | None
    """The most tokens of prompt and answer that training had room for."""
    tool_parser: str | None
    """vLLM's name for the tool-call format; None if it is unknown."""
    base: str | None = None
    """The base model of an adapter."""
    rank: int | None = None


def serve_command(served: Served) -> str | None:
    """Returns the `vllm serve` command, or None for an adapter whose rank vLLM does not support."""
    words = ["vllm", "serve", served.base or served.path]
    if served.base is not None:
        if (rank := lora_rank(served.rank)) is None:
            return None
        words += ["--enable-lora", "--max-lora-rank", str(rank)]
        words += ["--lora-modules", f"{served.name}={served.path}"]
    else:
        words += ["--served-model-name", served.name]
    if served.precision in _NUMBERS:
        words += ["--dtype", _NUMBERS[served.precision]]
    if served.max_length is not None:
        words += ["--max-model-len", str(served.max_length)]
    if served.tool_parser is not None:
        words += ["--enable-auto-tool-choice", "--tool-call-parser", served.tool_parser]
    return shlex.join(words)


def tool_parser(conversation: str) -> str | None:
    """Returns vLLM's parser for the tool call at the end of a conversation's text, if known.

    conversation: a chat template's text of a call of PROBE_TOOL whose argument is SENTINEL.
    """
    before = conversation[: max(0, conversation.rfind(SENTINEL))][-200:]
    return next((name for name, pattern in _FORMATS if pattern.search(before)), None)
