"""Writes an imported rollout as a row in our layout, with where it comes from."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stillroom.data.layouts.foreign import ending
from stillroom.errors import FailureClass
from stillroom.files import content_hash
from stillroom.importing.conversations.rollouts import ImportedRollout
from stillroom.importing.conversations.row_table import LoggedFacts
from stillroom.importing.payloads.fields import iso_time, seconds_between
from stillroom.rollout.rewards.rewards import SUCCESS_THRESHOLD
from stillroom.types import Answerer, StopReason, Usage, total_usd

_LONGEST_ERROR = 500


def rollout_id(facts: LoggedFacts) -> str:
    """Returns the id of a rollout, which follows from the place of its kept row."""
    return content_hash([facts.format, facts.source])


def rollout_row(
    rollout: ImportedRollout,
    *,
    tools: Sequence[Mapping[str, Any]],
    scores: Mapping[str, float],
    reward: float | None,
    origin: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the row of a rollout, but for its task; what its source does not say is left out."""
    kept = rollout.kept
    last = msgspec.json.decode(rollout.messages[-1])
    is_cut = kept.finish_reason == "length"
    stop = ending([last], is_failed=kept.error is not None, is_truncated=is_cut)
    if kept.finish_reason == "content_filter" and kept.error is None:
        stop = StopReason.CONTENT_FILTER
    row: dict[str, Any] = {
        "id": rollout_id(kept),
        "task_id": "",
        "sample": 0,
        "messages": msgspec.Raw(rollout.messages_json),
        "tools": tools,
        "metadata": msgspec.Raw(rollout.metadata),
        "reward": reward,
        "rewards": scores,
        "success": None if reward is None else reward >= SUCCESS_THRESHOLD,
        "stop_reason": stop,
        "turns": rollout.num_turns,
        "truncated": is_cut or stop is StopReason.CONTENT_FILTER,
        "error": _failure(kept.error),
        "cost_usd": total_usd(facts.cost_usd for facts in rollout.facts),
    }
    return row | _known(rollout.facts) | {"origin": origin}


def _failure(error: str | None) -> dict[str, str] | None:
    if error is None:
        return None
    return {"class": FailureClass.INTERNAL, "message": error[:_LONGEST_ERROR]}


def _known(facts: Sequence[LoggedFacts]) -> dict[str, Any]:
    """Returns those fields of a row that only some sources know."""
    usages = [each.usage for each in facts if each.usage is not None]
    start = iso_time(next((each.started_at for each in facts if each.started_at), None))
    named = [each for each in facts if each.model is not None]
    known: dict[str, Any] = {}
    if usages:
        known["usage"] = Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
        )
    if named:
        last = named[-1]
        teacher = {"provider": last.provider or last.format, "model": last.model, "settings": {}}
        known["teacher"] = teacher
        models = dict.fromkeys(each.model for each in named if each.model is not None)
        known["answered_by"] = [Answerer(model=model) for model in models]
    if start is not None:
        known["started_at"] = start
    if (duration := _duration(facts)) is not None:
        known["duration_s"] = duration
    return known


def _duration(facts: Sequence[LoggedFacts]) -> float | None:
    """Returns the seconds from the first call's beginning to the last one's end."""
    first, last = facts[0], facts[-1]
    if last.duration_s is None or len(facts) == 1:
        return last.duration_s
    passed = seconds_between(first.started_at, last.started_at)
    return None if passed is None else round(passed + last.duration_s, 3)
