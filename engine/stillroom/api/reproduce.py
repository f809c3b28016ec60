"""The command line that starts a run again, made from its request."""

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from stillroom.api.operations import operation_of_run
from stillroom.run_folder import RunRequest


def command_of(request: RunRequest) -> str:
    """Returns the command that starts the run again, without options that have their default."""
    operation = operation_of_run(request.kind)
    words = [
        word
        for name, field in operation.request.model_fields.items()
        for word in _flags(name, field, request.request)
    ]
    return shlex.join(["stillroom", operation.name.replace("_", "-"), *words])


def _flags(name: str, field: FieldInfo, request: Mapping[str, Any]) -> Iterator[str]:
    value, default = request.get(name), field.get_default(call_default_factory=True)
    if value is None or value == default or (value == [] and not default):
        return
    if isinstance(value, list) and isinstance(default, tuple) and value == [*default]:
        return
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        yield f"--{flag}" if value else f"--no-{flag}"
        return
    yield f"--{flag}"
    yield from map(str, value) if isinstance(value, list) else [str(value)]
