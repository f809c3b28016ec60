"""Renders conversations as text with a tokenizer's chat template, and finds its turn markers."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

from stillroom.errors import ConfigError, ModelError
from stillroom.types import Message, ToolSchema

PROBE: list[Message] = [{"role": "user", "content": "x"}]
SENTINEL = "0123456789"
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
THINKING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""The fields of a message in which rows have thinking and templates expect it."""
NAMED_TEMPLATES = ("chatml", "gemma", "llama3")
"""The templates that come with Stillroom, for base models, which have no template.

chatml and llama3 write tool calls in the formats of Hermes and Llama 3; gemma takes no tools."""


def is_chatml_without_tools(template: str) -> bool:
    """Returns whether a template is ChatML without tools, such as that of SmolLM2.

    The named template chatml writes the same turns, and also tools.
    """
    return "<|im_start|>" in template and "tool" not in template


class ChatTemplate:
    """Renders conversations as text with the chat template of a transformers tokenizer.

    `variables` are the template's variables other than the conversation, e.g. enable_thinking.
    The methods raise ModelError if the template refuses a conversation.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        include_thinking: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._variables = dict(variables or {})
        self.include_thinking = include_thinking

    @cached_property
    def has_generation_tags(self) -> bool:
        """Whether the template itself marks the assistant's text with generation tags."""
        return _GENERATION_TAG.search(self._tokenizer.chat_template) is not None

    @cached_property
    def end_of_turn(self) -> str:
        """The text of the special token that ends an assistant's turn, e.g. `<|im_end|>`."""
        tail = self._probe_answer.partition(SENTINEL)[2]
        special = [str(t) for t in self._tokenizer.get_added_vocab() if tail.lstrip().startswith(t)]
        if not special:
            raise ModelError(
                "this model's chat template does not end an assistant's turn with a special token",
                "add one to chat_template.jinja: without it, the model cannot learn to stop",
            )
        return max(special, key=len)

    @cached_property
    def header(self) -> str:
        """The text before an assistant's turn, e.g. `<|im_start|>assistant` and a newline."""
        before = self.text(PROBE, [])
        after = self.text(PROBE, [], add_generation_prompt=True)
        return after[len(before) :] if after.startswith(before) else ""

    @cached_property
    def last_turn_prefix(self) -> str:
        """The text that the template prepends to a last turn, e.g. an empty thinking block."""
        before = self.text(PROBE, [], add_generation_prompt=True)
        answered = self._probe_answer
        return answered[len(before) :].partition(SENTINEL)[0] if answered.startswith(before) else ""

    @cached_property
    def control_tokens(self) -> list[str]:
        """The texts of all control tokens."""
        return [str(t) for t in self._tokenizer.added_tokens_decoder.values() if t.special]

    @cached_property
    def roles_needing_parts(self) -> frozenset[str]:
        """The roles whose `content` must be a list of parts for this template.

        Some templates of multimodal models silently drop a plain string.
        """
        messages: list[dict[str, Any]] = []
        roles: set[str] = set()
        for role in ("user", "assistant"):
            turn = {"role": role, "content": SENTINEL}
            if not self._renders_probe([*messages, turn]):
                turn = {"role": role, "content": _text_parts(SENTINEL)}
                if self._renders_probe([*messages, turn]):
                    roles.add(role)
            messages.append(turn)
        return frozenset({*roles, "system", "tool"} if "user" in roles else roles)

    def _renders_probe(self, messages: list[dict[str, Any]]) -> bool:
        """Returns whether the template renders the text of each message once."""
        from jinja2 import TemplateError

        try:
            text, _ = self._apply_template(messages, None)
        except (TemplateError, TypeError):
            return False
        # Some templates render a list of parts as its Python repr.
        return text.count(SENTINEL) == len(messages) and "{'type'" not in text

    @cached_property
    def _probe_answer(self) -> str:
        return self.text([*PROBE, {"role": "assistant", "content": SENTINEL}], [])

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        *,
        add_generation_prompt: bool = False,
        include_thinking: bool | None = None,
    ) -> str:
        """Returns the conversation as text; `add_generation_prompt` adds the next header.

        `include_thinking` overrides the setting of this object, unless it is None.
        """
        return self._render(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            include_thinking=include_thinking,
        )[0]

    def text_with_spans(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of a conversation, and the spans between its generation tags."""
        return self._render(messages, tools, with_spans=True)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        *,
        add_generation_prompt: bool = False,
        include_thinking: bool | None = None,
        with_spans: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        from jinja2 import TemplateError

        keeps_thinking = self.include_thinking if include_thinking is None else include_thinking
        prepared = [_for_template(message, include_thinking=keeps_thinking) for message in messages]
        for message in prepared:
            if message["role"] in self.roles_needing_parts:
                message["content"] = _text_parts(message["content"])
        try:
            return self._apply_template(
                prepared,
                cast("list[Any]", list(tools)) or None,
                add_generation_prompt=add_generation_prompt,
                with_spans=with_spans,
            )
        except (TemplateError, TypeError) as error:
            raise ModelError(
                f"the model's chat template refuses this conversation: {error}",
                "check the order of the roles; some templates do not allow system or tool messages",
            ) from error

    def _apply_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        *,
        add_generation_prompt: bool = False,
        with_spans: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Applies the template to prepared messages; returns the text and the tagged spans."""
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template(
            [messages],
            tools=tools,
            chat_template=self._tokenizer.chat_template,
            return_assistant_tokens_mask=with_spans,
            add_generation_prompt=add_generation_prompt,
            **self._tokenizer.special_tokens_map,
            **self._variables,
        )
        texts, spans = rendered
        return texts[0], [(start, end) for start, end in spans[0]] if with_spans else []


def _text_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _for_template(message: Message, *, include_thinking: bool) -> dict[str, Any]:
    """Prepares a message for chat templates: arguments become objects, content becomes a string."""
    prepared: dict[str, Any] = dict(message)
    prepared["content"] = plain_text(message)
    thinking = thinking_of(message)
    for name in THINKING_FIELDS:
        prepared.pop(name, None)
        if include_thinking and thinking:
            prepared[name] = thinking
    if message.get("tool_calls"):
        prepared["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call)}}
            for call in message.get("tool_calls", [])
        ]
    return prepared


def thinking_of(message: Mapping[str, Any]) -> str:
    """Returns the text of a message's field for thinking; "" if there is none."""
    values = (message.get(name) for name in THINKING_FIELDS)
    return next((text for text in values if isinstance(text, str) and text), "")


def without_thinking(message: Message) -> Message:
    """Returns the message without its fields for thinking."""
    others = {key: value for key, value in message.items() if key not in THINKING_FIELDS}
    return cast("Message", others)


def _arguments(call: Any) -> Any:
    """Returns a call's arguments as an object, or unchanged if they are not a JSON object."""
    arguments = call["function"]["arguments"]
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def plain_text(message: Message) -> str:
    """Returns a message's content as text; a list of parts is joined.

    Raises ModelError for parts that are not text.
    """
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for part in content:
        if part.get("type") not in ("text", "input_text", "output_text"):
            raise ModelError(
                f"a message has a part of type {part.get('type')!r}; only text can be rendered",
                "remove images and audio from the rows",
            )
        texts.append(str(part.get("text", "")))
    return "".join(texts)


ReasoningMode = Literal[
    "none", "disabled", "enabled", "minimal", "low", "medium", "high", "xhigh"
]  # fmt: skip
_NO_THINKING = frozenset({"none", "disabled"})
# Templates of Qwen, SmolLM and GLM read the first; those of DeepSeek and Granite read the second.
_SWITCHES = ("enable_thinking", "thinking")
_EFFORT_VARIABLE = "reasoning_effort"
_GENERATION_TAGS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
_NEAREST_LEVELS = {"minimal": "low", "xhigh": "high", "enabled": "medium"}
"""The nearest effort level for modes that templates with effort levels (gpt-oss) lack."""


def reasoning_variables(chat_template: str, mode: ReasoningMode | None) -> Mapping[str, Any]:
    """Returns the chat template's variables for a reasoning mode; no variables if it is None.

    A template with effort levels receives the level; a template with a switch receives true for any
    level. Raises ConfigError if the template has neither, and ModelError if it is invalid.
    """
    if mode is None:
        return {}
    variables = _variables_of(chat_template)
    if mode not in _NO_THINKING and _EFFORT_VARIABLE in variables:
        return {_EFFORT_VARIABLE: _NEAREST_LEVELS.get(mode, mode)}
    for switch in _SWITCHES:
        if switch in variables:
            return {switch: mode not in _NO_THINKING}
    if _EFFORT_VARIABLE in variables:
        raise ConfigError(
            f"rollout.reasoning_mode: {mode}: this model always thinks; its chat template only "
            "sets the effort",
            "set low, medium or high, or leave reasoning_mode out",
        )
    raise ConfigError(
        f"rollout.reasoning_mode: {mode}: this model's chat template cannot switch reasoning (it "
        f"reads none of {', '.join((*_SWITCHES, _EFFORT_VARIABLE))})",
        "leave reasoning_mode out, or use a model whose template reads one of them",
    )


def _variables_of(chat_template: str) -> set[str]:
    """Returns the variables that a template reads and does not set itself."""
    import jinja2
    from jinja2 import meta

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])  # noqa: S701
    # Generation tags are an extension of transformers that plain jinja2 cannot parse. They read no
    # variables, so they can be removed.
    plain = _GENERATION_TAGS.sub("", chat_template)
    try:
        return meta.find_undeclared_variables(environment.parse(plain))
    except jinja2.TemplateError as error:
        raise ModelError(
            f"the model's chat template cannot be read: {error}", "correct chat_template.jinja"
        ) from error


def template_file(name: str) -> Path:
    """Returns the file of a template that comes with Stillroom."""
    return Path(__file__).parent / "templates" / f"{name}.jinja"
