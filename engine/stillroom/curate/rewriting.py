"""Changes the answers of training rows by a function of the user's, in a process of its own."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stillroom.curate.facts import NULL, RolloutParts
from stillroom.data.words import final_answer
from stillroom.errors import InputError
from stillroom.files import content_hash

FUNCTION = "rewrite"
NO_ANSWER, FAILED, DROPPED = "no answer to rewrite", "rewrite failed", "rewrite returned nothing"
_Call = Callable[[str, dict[str, Any]], tuple[str, bool]]


@dataclass(frozen=True, slots=True)
class RewrittenParts:
    """The parts of a row with another answer, and a hash of the answer that it had."""

    parts: RolloutParts
    original_sha256: str
    """The first 16 digits of the SHA-256 of the rollout's answer."""


@dataclass(frozen=True, slots=True)
class Unwritten:
    """The reason why a row is left out, and the error of the function if it raised one."""

    reason: str
    error: str | None = None


class AnswerRewriter:
    """Calls the user's function with the final answer of each row."""

    def __init__(self, call: _Call) -> None:
        self._call = call

    def rewrite(self, parts: RolloutParts) -> RewrittenParts | Unwritten:
        """Returns the row with the answer that the function returns, or why it is left out."""
        messages: list[dict[str, Any]] = msgspec.json.decode(parts.messages)
        answer = final_answer(messages)
        if not answer.strip() or messages[-1].get("tool_calls"):
            return Unwritten(NO_ANSWER)
        metadata = {} if parts.metadata == NULL else msgspec.json.decode(parts.metadata)
        text, is_error = self._call(answer, metadata)
        if is_error:
            return Unwritten(FAILED, text)
        if not text.strip():
            return Unwritten(DROPPED)
        changed = [*messages[:-1], {**messages[-1], "content": text}]
        encoded = msgspec.Raw(msgspec.json.encode(changed))
        rewritten = msgspec.structs.replace(parts, messages=encoded)
        return RewrittenParts(rewritten, content_hash(answer))


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
        if FUNCTION not in [schema["function"]["name"] for schema in pool.schemas]:
            raise InputError(
                f"{path} has no tool {FUNCTION!r}",
                "write from stillroom.tools import tool, then @tool and def rewrite(answer: str) "
                "-> str with a docstring",
            )

        async def answer(text: str, metadata: dict[str, Any]) -> tuple[str, bool]:
            result = await pool.call(FUNCTION, {"answer": text}, metadata=metadata)
            return result.content, result.is_error

        yield AnswerRewriter(lambda text, metadata: portal.call(answer, text, metadata))
