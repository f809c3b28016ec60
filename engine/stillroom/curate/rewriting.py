"""Rewrites the answers of training rows with the user's function, in a separate process."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stillroom.curate.facts import NULL, RawFields
from stillroom.data.words import final_answer
from stillroom.errors import InputError
from stillroom.files import content_hash

_FUNCTION = "rewrite"
_NO_ANSWER = "no answer to rewrite"
_FAILED = "rewrite failed"
_NO_REWRITE = "rewrite returned nothing"
REWRITE_ERRORS = {_FAILED, _NO_REWRITE}
"""The reasons to leave out a row that are errors of the user's function."""
REWRITE_FIX = "correct the function rewrite, which must return the new answer as a string"
_Call = Callable[[str, dict[str, Any]], tuple[str, bool]]
"""Calls the function with an answer and metadata; returns a text and whether it is an error."""


@dataclass(frozen=True, slots=True)
class RewrittenFields:
    """The fields of a row with its new answer, and a hash of its original answer."""

    raw_fields: RawFields
    original_sha256: str
    """The first 16 digits of the SHA-256 of the rollout's answer."""


@dataclass(frozen=True, slots=True)
class SkippedRewrite:
    """The reason why a row is left out, and the error of the function if it raised one."""

    reason: str
    error: str | None = None


class AnswerRewriter:
    """Calls the user's function with the final answer of each row."""

    def __init__(self, call: _Call) -> None:
        self._call = call

    def rewrite(self, raw_fields: RawFields) -> RewrittenFields | SkippedRewrite:
        """Returns the row with its new answer, or the reason why it is left out."""
        messages: list[dict[str, Any]] = msgspec.json.decode(raw_fields.messages)
        answer = final_answer(messages)
        if not answer.strip() or messages[-1].get("tool_calls"):
            return SkippedRewrite(_NO_ANSWER)
        metadata = {} if raw_fields.metadata == NULL else msgspec.json.decode(raw_fields.metadata)
        text, is_error = self._call(answer, metadata)
        if is_error:
            return SkippedRewrite(_FAILED, text)
        if not text.strip():
            return SkippedRewrite(_NO_REWRITE)
        changed = [*messages[:-1], {**messages[-1], "content": text}]
        encoded = msgspec.Raw(msgspec.json.encode(changed))
        rewritten = msgspec.structs.replace(raw_fields, messages=encoded)
        return RewrittenFields(rewritten, content_hash(answer))


@contextmanager
def open_rewriter(path: Path | None) -> Generator[AnswerRewriter | None]:
    """Yields the rewriter of a file with a function `rewrite`; None without a file.

    Raises InputError if the file has no such function.
    """
    if path is None:
        yield None
        return
    # Imported here, since few conversions run the user's code.
    from anyio.from_thread import start_blocking_portal

    from stillroom.tools.user.file import read_user_file
    from stillroom.tools.user.pool import UserPool

    pool = UserPool(tools_file=read_user_file(path), rewards_file=None, max_workers=1)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(pool):
        if _FUNCTION not in [schema["function"]["name"] for schema in pool.schemas]:
            raise InputError(
                f"{path} has no tool {_FUNCTION!r}",
                "import tool from stillroom.tools, and define @tool def rewrite(answer: str) -> "
                "str with a docstring",
            )

        async def call_rewrite(answer: str, metadata: dict[str, Any]) -> tuple[str, bool]:
            result = await pool.call(_FUNCTION, {"answer": answer}, metadata=metadata)
            return "" if result.is_none else result.content, result.is_error

        yield AnswerRewriter(lambda answer, metadata: portal.call(call_rewrite, answer, metadata))
