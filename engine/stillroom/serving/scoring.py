"""A teacher behind a vLLM or SGLang server that scores a student's rollouts.

Builds the requests for the logprobs of given tokens, and parses the responses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from stillroom.serving.model_server import (
    ModelServerClient,
    UnreadableResponseError,
    decode_response,
)
from stillroom.types import TokenTrace

ScoringProvider = Literal["vllm", "sglang"]
# Servers write -9999 for the logarithm of 0, so any value this low is no real log-probability.
_MIN_LOGPROB = -1000.0
# Rounding may put a log-probability above zero by this much at most.
_ROUNDING = 1e-2

_SglangLogprob = tuple[float | None, int, str | None]
"""A token's logprob (None for the first token), its id, and its text."""


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """A teacher's log-probabilities at the sampled tokens of one rollout, in their order."""

    logprobs: list[float]
    """The log-probability of each sampled token, in nats."""
    top_ids: list[list[int]] | None = None
    """The teacher's most likely tokens at each position, likeliest first; None if not requested."""
    top_logprobs: list[list[float]] | None = None
    """The log-probabilities of `top_ids` in nats; None if not requested."""


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    """A request for a teacher's logprobs of given tokens in one sequence."""

    model: str
    ids: Sequence[int]
    positions: Sequence[int]
    """The indices in `ids` of the tokens to score, ascending.

    Index 0 is never among them, because a model does not predict the first token.
    """
    top_k: int | None = None
    """The number of most likely tokens to return at each index; None to return none."""

    def path_and_body(self, provider: ScoringProvider) -> tuple[str, dict[str, Any]]:
        """Returns the path and the JSON body of the HTTP request."""
        if provider == "sglang":
            return "/generate", {
                "input_ids": list(self.ids),
                "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
                "return_logprob": True,
                "logprob_start_len": self.logprob_start,
                "top_logprobs_num": self.top_k or 0,
            }
        return "/v1/completions", {
            "model": self.model,
            "prompt": list(self.ids),
            "add_special_tokens": False,
            "max_tokens": 1,
            # The model's own generation config may set other values, and older servers then return
            # logprobs that are scaled by its temperature.
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "prompt_logprobs": self.top_k or 1,
        }

    @property
    def logprob_start(self) -> int:
        """The index from which SGLang must return entries.

        That is one before the first token to score, because the first entry has no logprob.
        """
        return min(self.positions) - 1

    def parse(self, provider: ScoringProvider, body: bytes) -> TeacherScores:
        """Parses the scores in a response body.

        Raises UnreadableResponseError if they do not match the request.
        """
        logprobs_at = self._parse_sglang(body) if provider == "sglang" else self._parse_vllm(body)
        logprobs = [self._logprob_at(i, logprobs_at[i]) for i in self.positions]
        if self.top_k is None:
            return TeacherScores(logprobs)
        tops = [self._top_k_at(i, logprobs_at[i], self.top_k) for i in self.positions]
        return TeacherScores(logprobs, [ids for ids, _ in tops], [values for _, values in tops])

    def _logprob_at(self, position: int, logprobs: Mapping[int, float]) -> float:
        """Returns the logprob of the sequence's token at a position, from all at that position."""
        token = self.ids[position]
        if token not in logprobs:
            raise UnreadableResponseError(
                f"expected a logprob of token id {token} at index {position}, got those of "
                f"{sorted(logprobs)[:3]}"
            )
        return _check_logprob(logprobs[token], position)

    def _top_k_at(
        self, position: int, logprobs: Mapping[int, float], top_k: int
    ) -> tuple[list[int], list[float]]:
        """Returns the ids and logprobs of the most likely tokens at a position, likeliest first."""
        # The entry also has the scored token itself, which may not be in the top k.
        top_tokens = sorted(logprobs, key=lambda token: -logprobs[token])[:top_k]
        if len(top_tokens) < top_k:
            raise UnreadableResponseError(
                f"expected {top_k} top tokens at index {position}, got {len(top_tokens)}"
            )
        return top_tokens, [_check_logprob(logprobs[token], position) for token in top_tokens]

    def _parse_vllm(self, body: bytes) -> dict[int, dict[int, float]]:
        """Returns the response's logprobs by token id, for each position to score."""
        choices = decode_response(body, _VllmResponse).choices
        scores = choices[0].prompt_logprobs if choices else None
        if scores is None:
            raise UnreadableResponseError("the response has no prompt_logprobs")
        if len(scores) != len(self.ids):
            raise UnreadableResponseError(
                f"expected prompt_logprobs of {len(self.ids)} tokens, got {len(scores)}"
            )
        return {
            position: {token: entry.logprob for token, entry in (scores[position] or {}).items()}
            for position in self.positions
        }

    def _parse_sglang(self, body: bytes) -> dict[int, dict[int, float]]:
        """Returns the response's logprobs by token id, for each position to score."""
        meta = decode_response(body, _SglangResponse).meta_info
        scored = meta.input_token_logprobs
        if len(scored) != len(self.ids) - self.logprob_start:
            raise UnreadableResponseError(
                "expected input_token_logprobs of "
                f"{len(self.ids) - self.logprob_start} tokens, got "
                f"{len(scored)}"
            )
        logprobs_at: dict[int, dict[int, float]] = {}
        for position in self.positions:
            listed = [scored[position - self.logprob_start]]
            if self.top_k is not None:
                tops = meta.input_top_logprobs
                if tops is None or len(tops) != len(scored):
                    raise UnreadableResponseError(
                        "input_top_logprobs is missing or does not match input_token_logprobs"
                    )
                listed += tops[position - self.logprob_start] or []
            logprobs_at[position] = {
                token: logprob for logprob, token, *_ in listed if logprob is not None
            }
        return logprobs_at


def _check_logprob(logprob: float, position: int) -> float:
    """Returns a logprob, or 0 if rounding put it slightly above 0.

    Raises UnreadableResponseError for a value that a sampled token cannot have.
    """
    if not _MIN_LOGPROB < logprob <= _ROUNDING:
        raise UnreadableResponseError(
            f"the logprob of the token at index {position} is {logprob:g}, which no sampled token "
            "can have; the server may mask logits"
        )
    return min(logprob, 0.0)


class _Logprob(msgspec.Struct):
    logprob: float


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[int, _Logprob] | None] | None = None


class _VllmResponse(msgspec.Struct):
    choices: list[_Choice]


class _MetaInfo(msgspec.Struct):
    input_token_logprobs: list[_SglangLogprob]
    input_top_logprobs: list[list[_SglangLogprob] | None] | None = None


class _SglangResponse(msgspec.Struct):
    meta_info: _MetaInfo


class ServedTeacher:
    """Scores the sampled tokens of finished rollouts, one call per rollout."""

    def __init__(
        self,
        server: ModelServerClient,
        model: str,
        *,
        provider: ScoringProvider,
        top_k: int | None = None,
    ) -> None:
        self.server, self.model = server, model
        self.provider: ScoringProvider = provider
        self.top_k = top_k

    @property
    def concurrency(self) -> int:
        """The maximum number of rollouts that are scored at once."""
        return self.server.settings.concurrency

    async def score(self, trace: TokenTrace) -> TeacherScores:
        """Returns the teacher's logprobs of a rollout's sampled tokens.

        Tokens after the last sampled one are not sent, since no score depends on them. Without
        sampled tokens, no request is sent.

        Raises:
            CallFailedError: every attempt failed, so the rollout has no scores.
            TeacherError: no call can succeed.
        """
        positions = [i for i, is_sampled in enumerate(trace.sampled) if is_sampled and i > 0]
        if not positions:
            return TeacherScores([], [], [])
        ids = trace.ids[: positions[-1] + 1]
        request = ScoringRequest(self.model, ids, positions, self.top_k)
        path, body = request.path_and_body(self.provider)
        return await self.server.post(
            path, body, lambda data: request.parse(self.provider, data), tokens=len(ids)
        )
