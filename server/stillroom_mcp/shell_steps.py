"""Next steps and fixes as a shell shows them: CLI commands and flags instead of tool calls."""

import functools
import re

from stillroom import api

_CALL = re.compile(r"\b([a-z]+(?:_[a-z]+)+)\(([^()]*)\)")
# Neither of the two is part of a path, such as data/kl_prompts.jsonl.
_NAMED = re.compile(r"(?<![\w./-])([a-z]+(?:_[a-z]+)+)\b(?![=/-]|\.\w)")
_ARGUMENT = re.compile(r"(?<![\w.`-])([a-z][a-z_]*)=(<[^>]*>|\"\"|[^\s,;()`]+)")
_OPTION = re.compile(r"(?<![\w.`/-])([a-z]+(?:_[a-z]+)+)\b(?![=/-]|\.\w)")


def as_cli_commands(text: str) -> str:
    """Returns a text with CLI commands and flags in place of tool calls and arguments."""
    operations = {operation.name: operation for operation in api.OPERATIONS}
    fields = _request_fields()

    def command(call: re.Match[str]) -> str:
        operation = operations.get(call[1])
        if operation is None:
            return call[0]
        words = ["stillroom", operation.command]
        for argument in re.split(r", (?=[a-z_]+=)", call[2]):
            name, equals, value = argument.partition("=")
            flag = "--" + name.replace("_", "-")
            values = [] if value == "true" else [re.sub(r",\s*", " ", value.strip("[]"))]
            if not equals or name in operation.positional[:1]:
                words += values if equals else [name]
            else:
                words += [flag, *values]
        return " ".join(word for word in words if word)

    def name(match: re.Match[str]) -> str:
        operation = operations.get(match[1])
        return match[0] if operation is None else f"stillroom {operation.command}"

    def flag(match: re.Match[str]) -> str:
        if match[1] not in fields:
            return match[0]
        value = "" if match[2] == "true" else f" {match[2]}"
        return f"--{match[1].replace('_', '-')}{value}"

    text = _ARGUMENT.sub(flag, _CALL.sub(command, text))
    text = _NAMED.sub(name, re.sub(r" \(tool [a-z_]+\)", "", text))
    return text.replace("an stillroom ", "a stillroom ")


def as_cli_step(text: str) -> str:
    """Returns a next step with CLI commands, in which the names of options are flags too."""
    fields = _request_fields()

    def flag(match: re.Match[str]) -> str:
        is_option = match[1] in fields
        return f"--{match[1].replace('_', '-')}" if is_option else match[0]

    return _OPTION.sub(flag, as_cli_commands(text))


@functools.cache
def _request_fields() -> frozenset[str]:
    return frozenset(name for each in api.OPERATIONS for name in each.request.model_fields)
