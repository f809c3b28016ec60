"""Checks before a run, with a few requests, that a served teacher can score the student's tokens.

The teacher must have the student's tokenizer and chat template, a context long enough for its
conversations, and logprobs that do not vary between calls. A rereading teacher must be served with
the tokenizer and chat template that this process uses for it.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stillroom.data.chat.render import ChatRenderer
from stillroom.errors import CallFailedError, FailureClass, ModelError, TeacherError
from stillroom.models.load import load_tokenizer
from stillroom.models.pairing import (
    OFF_POLICY_ROUTE,
    REREAD_ROUTE,
    alternatives,
    check_tokenizers,
)
from stillroom.models.resolve import locate_model
from stillroom.serving.model_server import (
    ModelServerClient,
    NotServedError,
    Tokens,
    UnreadableResponseError,
    decode_response,
)
from stillroom.serving.scoring import ServedTeacher, TeacherScores
from stillroom.settings import Workspace
from stillroom.types import Message, TokenTrace

_TEXT = (
    "The quick brown fox: 3.14159 × 2,718 = ? Ünïcödé, 中文字符, русский, 🙂.\n\n"
    "def f(x):\n\treturn {'a': [x, None]}  # tabs and   spaces\n"
)
_CHAT: list[Message] = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "And 3 + 3?"},
]
# Spans several blocks of a prefix cache.
_PROBE_TOKENS = 96
# In nats, averaged over tokens. In half precision, batches of different sizes round differently.
_TOLERANCE = 0.1


async def check_served(
    workspace: Workspace,
    tokenizer: str | None,
    teacher: ServedTeacher,
    student_tokenizer: Any,
    *,
    max_context: int,
    num_extra: int = 0,
) -> list[str]:
    """Checks a served teacher and returns the findings as notes for the run's report.

    `tokenizer` is the folder or hub id of the teacher's tokenizer; if None, the server's
    `/tokenize` is used instead. `num_extra` is the number of tokens that the teacher's own prompt
    adds to a conversation.

    Raises:
        ModelError: the teacher has a different tokenizer or chat template than the student, or its
            context is shorter than `max_context` tokens.
        TeacherError: the server does not answer, does not serve the model, or returns different
            scores for the same tokens in different calls.
    """
    async with teacher.server:
        try:
            length = await _check_model(teacher, max_context, num_extra)
            if tokenizer is not None:
                names = f"the student and the teacher's tokenizer {tokenizer!r}"
                server_tokenizer = load_tokenizer(locate_model(workspace, tokenizer))
                check_tokenizers(names, student_tokenizer, server_tokenizer)
                finding = f"its tokenizer and chat template are those of {tokenizer}"
            else:
                finding = await _check_tokens(teacher, student_tokenizer, _student_wording(teacher))
            gap = await _check_scores(teacher, student_tokenizer, max_context)
        except (CallFailedError, UnreadableResponseError) as error:
            raise _failed_check(teacher, error) from error
    note = (
        f"{_describe(teacher, length)}; {finding}; its scores of the same tokens differ by "
        f"{gap:.1e} nats between calls"
    )
    return [note]


def _describe(teacher: ServedTeacher, length: int | None) -> str:
    context = "an unknown context length" if length is None else f"a context of {length} tokens"
    return f"{teacher.model} at {teacher.server.root} has {context}"


@dataclass(frozen=True, slots=True)
class RereadingServer:
    """The server of a rereading teacher, after it passed its checks."""

    max_context: int
    """The maximum number of tokens in a conversation that it scores."""
    note: str


async def check_rereading(teacher: ServedTeacher, tokenizer: Any, name: str) -> RereadingServer:
    """Checks the server of a teacher that rereads the student's text with a different tokenizer.

    tokenizer, name: the teacher's tokenizer in this process, and its name in config.yml.

    Raises:
        ModelError: the server's tokenizer or chat template differs from that tokenizer.
        TeacherError: the server cannot score tokens (see `check_served`).
    """
    async with teacher.server:
        try:
            length = await _check_model(teacher, 0, 0)
            # To score a prompt, vLLM must have room for the token after it.
            room = sys.maxsize if length is None else length - (teacher.provider == "vllm")
            finding = await _check_tokens(teacher, tokenizer, _rereading_wording(teacher, name))
            gap = await _check_scores(teacher, tokenizer, room)
        except (CallFailedError, UnreadableResponseError) as error:
            raise _failed_check(teacher, error) from error
    note = (
        f"{_describe(teacher, length)} and returns the top {teacher.top_k} tokens at each "
        f"position; {finding}; its scores of the same tokens differ by {gap:.1e} nats between calls"
    )
    return RereadingServer(room, note)


def _failed_check(teacher: ServedTeacher, error: Exception) -> TeacherError:
    """Returns the error for a check that failed because of a request or its response."""
    fixes = ["find the cause in the server's log"]
    if (num := teacher.top_k) is not None:
        fixes.append(f"allow {num} logprobs (vLLM: --max-logprobs), or lower algorithm.top_k")
    return TeacherError(
        f"{teacher.server.root} failed a check before the run: {error}",
        alternatives(*fixes, OFF_POLICY_ROUTE),
    )


@dataclass(frozen=True, slots=True)
class _Wording:
    """The wording of errors and notes about a server's tokenizer and the expected one."""

    compared: str
    """The names of the two tokenizers that are compared."""
    expected: str
    """Whose tokenizer and template are expected, as in "its tokenizer is the student's"."""
    fix: str
    """The fix for different tokenizers."""
    template_fix: str
    """The fix for different chat templates."""
    if_unknown: str | None = None
    """The clause for the note if the server has no /tokenize endpoint; None if that is an error."""


def _student_wording(teacher: ServedTeacher) -> _Wording:
    """Returns the wording for a teacher that must have the student's tokenizer and template."""
    return _Wording(
        f"the student and the teacher {teacher.model!r}",
        "the student's",
        alternatives("use a teacher of the student's model family", REREAD_ROUTE, OFF_POLICY_ROUTE),
        alternatives(
            "copy the teacher's chat_template.jinja into the student's folder",
            REREAD_ROUTE,
            OFF_POLICY_ROUTE,
        ),
    )


def _rereading_wording(teacher: ServedTeacher, name: str) -> _Wording:
    """Returns the wording for a server of a teacher that rereads the student's text."""
    fix = "set teacher.tokenizer to the folder or hub id of the model that the server serves"
    return _Wording(
        f"the tokenizer {name!r} and the teacher {teacher.model!r}",
        f"those of {name}",
        fix,
        fix,
        f"the server has no /tokenize endpoint, so its tokenizer was not compared with {name}",
    )


async def _check_model(teacher: ServedTeacher, max_context: int, num_extra: int) -> int | None:
    """Returns the model's context length in tokens; None if the server does not state it.

    Raises TeacherError if the server does not serve the model, and ModelError if its context is too
    short.
    """
    served = await teacher.server.context_lengths()
    if teacher.model not in served:
        raise TeacherError(
            f"{teacher.server.root} serves no model {teacher.model!r}; it serves: "
            f"{', '.join(served)}",
            "set teacher.path to the name of a model that the server serves",
        )
    length = served[teacher.model]
    # To score a prompt, vLLM must have room for the token after it.
    needed = max_context + num_extra + (teacher.provider == "vllm")
    if length is not None and length < needed:
        extra_note = f", plus {num_extra} for the teacher's own prompt" if num_extra else ""
        raise ModelError(
            f"{teacher.model!r} is served with a context of {length} tokens, but conversations may "
            f"have {max_context}{extra_note}",
            f"serve it with {needed} tokens (vLLM: --max-model-len), or set "
            "rollout.max_context_window: "
            f"{length - needed + max_context}",
        )
    return length


async def _check_tokens(teacher: ServedTeacher, tokenizer: Any, wording: _Wording) -> str:
    """Compares the server's token ids of a text and a conversation with those of a local tokenizer.

    Returns the finding as a clause for the note, or raises ModelError if the ids differ.
    """
    server = teacher.server
    text = _TEXT + "".join(sorted(tokenizer.get_added_vocab()))
    expected_ids = _encode(tokenizer, text)
    server_ids = await _tokenize(
        server, {"model": teacher.model, "prompt": text, "add_special_tokens": False}
    )
    if server_ids is None:
        if wording.if_unknown is not None:
            return wording.if_unknown
        raise ModelError(
            f"{server.root} has no /tokenize endpoint, so its tokenizer cannot be checked",
            "set teacher.tokenizer to the folder or hub id of the model that it serves",
        )
    if expected_ids != server_ids:
        index, expected_text, server_text = _first_difference(expected_ids, server_ids, tokenizer)
        raise ModelError(
            f"{wording.compared} have different tokenizers: token ids of the same text differ from "
            f"index {index} on ({expected_text!r}, {server_text!r})",
            wording.fix,
        )
    chat_request = {"model": teacher.model, "messages": _CHAT, "add_generation_prompt": True}
    try:
        server_ids = await _tokenize(server, chat_request)
    except CallFailedError as error:
        if error.kind is not FailureClass.BAD_REQUEST:
            raise
        return f"its tokenizer is {wording.expected}; its chat template could not be checked"
    expected_ids = ChatRenderer(tokenizer).prompt_ids(_CHAT, [])
    if server_ids is not None and expected_ids != server_ids:
        index, expected_text, server_text = _first_difference(expected_ids, server_ids, tokenizer)
        raise ModelError(
            f"{wording.compared} have different chat templates, so the teacher would score "
            "conversations in a format it was not trained on: token ids of the same conversation "
            f"differ from index {index} on ({expected_text!r}, {server_text!r})",
            wording.template_fix,
        )
    return f"its tokenizer and chat template are {wording.expected}"


async def _check_scores(teacher: ServedTeacher, tokenizer: Any, max_context: int) -> float:
    """Returns the mean absolute difference, in nats, of the same tokens' scores between calls.

    The tokens are scored twice in full, then without their second half, which reveals a prefix
    cache that affects the scores. Raises TeacherError if the difference is too large.
    """
    ids = (_encode(tokenizer, _TEXT) * _PROBE_TOKENS)[: min(_PROBE_TOKENS, max_context)]
    full = await _scores(teacher, ids)
    repeated = await _scores(teacher, ids)
    first_half = await _scores(teacher, ids[: len(ids) // 2])
    gap = max(_mean_gap(full, repeated), _mean_gap(full, first_half))
    if not gap <= _TOLERANCE:
        raise TeacherError(
            f"{teacher.server.root} returns different logprobs for the same tokens in different "
            f"calls (by {gap:.3g} nats on average), so they cannot be trained on",
            "start the server without its prefix cache (vLLM: --no-enable-prefix-caching; SGLang: "
            "--disable-radix-cache)",
        )
    return gap


async def _scores(teacher: ServedTeacher, ids: Sequence[int]) -> TeacherScores:
    """Returns the teacher's scores of all tokens but the first."""
    sampled = [False, *[True] * (len(ids) - 1)]
    return await teacher.score(
        TokenTrace(ids=list(ids), sampled=sampled, logprobs=[0.0] * len(ids))
    )


def _mean_gap(one: TeacherScores, other: TeacherScores) -> float:
    """Returns the mean absolute difference of the logprobs that both have."""
    gaps = [abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=False)]
    return sum(gaps) / len(gaps)


async def _tokenize(server: ModelServerClient, body: dict[str, Any]) -> list[int] | None:
    """Returns the token ids from the server's `/tokenize`; None if the server has no such path."""
    try:
        return await server.post(
            "/tokenize", body, lambda data: decode_response(data, Tokens).tokens
        )
    except NotServedError:
        return None


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _first_difference(
    expected_ids: Sequence[int], server_ids: Sequence[int], tokenizer: Any
) -> tuple[int, str, str]:
    """Returns the index where the ids first differ, and the next 8 tokens of both as text."""
    pairs = enumerate(zip(expected_ids, server_ids, strict=False))
    index = next((i for i, (a, b) in pairs if a != b), min(len(expected_ids), len(server_ids)))
    return (
        index,
        tokenizer.decode(expected_ids[index : index + 8]),
        tokenizer.decode(server_ids[index : index + 8]),
    )
