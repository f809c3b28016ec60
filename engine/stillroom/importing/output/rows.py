"""Writes imported rollouts as rows in Stillroom's format, with scores, origin and reward."""

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from stillroom.data.distribution import Distribution
from stillroom.data.formats import task_from_row
from stillroom.data.layouts.foreign import infer_stop_reason
from stillroom.errors import FailureClass
from stillroom.files import LineWriter, content_hash
from stillroom.importing.conversations.call_tree import NONE
from stillroom.importing.conversations.collector import RowCollector
from stillroom.importing.conversations.rollouts import ImportedRollout
from stillroom.importing.conversations.row_table import StoredRow
from stillroom.importing.output.feedback import (
    RewardScales,
    add_lowest,
    alternatives_differ,
    reward_of,
)
from stillroom.importing.output.prompts import PromptStore
from stillroom.importing.payloads.fields import iso_time, seconds_between
from stillroom.importing.spill import Spill
from stillroom.importing.tally import ImportTally
from stillroom.rollout.rewards.rewards import SUCCESS_THRESHOLD
from stillroom.secrecy.patterns import has_reserved_address
from stillroom.types import Answerer, StopReason, Usage, total_usd

_MAX_ERROR_LENGTH = 500
UNKNOWN_PROVIDER = "unknown"
"""The provider if the source does not name it."""


def rollout_id(row: StoredRow) -> str:
    """Returns the id of the rollout with this kept row: a hash of the row's format and location."""
    return content_hash([row.format, row.source])


def rollout_row(
    rollout: ImportedRollout,
    *,
    last: dict[str, Any],
    tools: Sequence[Mapping[str, Any]],
    scores: Mapping[str, float],
    reward: float | None,
    origin: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the row of a rollout, with an empty task id and without fields that no call has.

    last: the rollout's last message.
    """
    kept = rollout.kept
    is_truncated = kept.finish_reason == "length"
    is_failed = kept.error is not None and not (kept.failure and kept.failure.is_reward_failure)
    stop = kept.stop_reason
    # Where only a reward failed, the rollout itself ended as its last message says.
    if stop is None or (stop is StopReason.ERROR and not is_failed):
        stop = infer_stop_reason([last], is_failed=is_failed, is_truncated=is_truncated)
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
        "truncated": is_truncated or stop.cuts_off,
        "error": _error_field(kept),
        "cost_usd": total_usd(call.cost_usd for call in rollout.calls),
    }
    return row | _optional_fields(rollout.calls) | {"origin": origin}


def _error_field(kept: StoredRow) -> dict[str, str] | None:
    if kept.error is None:
        return None
    return {
        "class": kept.failure or FailureClass.INTERNAL,
        "message": kept.error[:_MAX_ERROR_LENGTH],
    }


def _optional_fields(calls: Sequence[StoredRow]) -> dict[str, Any]:
    """Returns the fields of a row that only some sources have."""
    usages = [call.usage for call in calls if call.usage is not None]
    start = iso_time(next((call.started_at for call in calls if call.started_at), None))
    with_model = [call for call in calls if call.model is not None]
    fields: dict[str, Any] = {}
    if usages:
        fields["usage"] = Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
        )
    if with_model:
        last = with_model[-1]
        teacher = {
            "provider": last.provider or UNKNOWN_PROVIDER,
            "model": last.model,
            "settings": {},
        }
        fields["teacher"] = teacher
        models = dict.fromkeys(
            model for call in with_model for model in call.answered_by or (call.model,) if model
        )
        fields["answered_by"] = [Answerer(model=model) for model in models]
    if calls[-1].tool_errors is not None:
        fields["tool_errors"] = calls[-1].tool_errors
    if start is not None:
        fields["started_at"] = start
    if (duration := _duration(calls)) is not None:
        fields["duration_s"] = duration
    return fields


def _duration(calls: Sequence[StoredRow]) -> float | None:
    """Returns the seconds from the start of the first call to the end of the last one."""
    first, last = calls[0], calls[-1]
    if last.duration_s is None or len(calls) == 1:
        return last.duration_s
    elapsed_s = seconds_between(first.started_at, last.started_at)
    return None if elapsed_s is None else round(elapsed_s + last.duration_s, 3)


TOOLS_UNKNOWN = "tools not logged"
TOOLS_INFERRED = "tools inferred"
TOOLS_CHANGED = "tools changed between calls"
_CALLS, _TASK_ID, _SYSTEM = b'"tool_calls":', b'"task_id":"', b'{"role":"system"'


@dataclass(slots=True)
class SplitPart:
    """The training or the held-out part of the rollouts (all of them without a split).

    `rows` and `prompts` are the writers of its files.
    """

    rows: LineWriter | None = None
    prompts: LineWriter | None = None
    models: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """The number of rows by provider and model."""
    pending_rows: "array[int]" = field(default_factory=lambda: array("q"))
    """Three numbers for each row to be written: its offset and size in the spill, and its prompt's
    number."""
    new_prompts: "array[int]" = field(default_factory=lambda: array("q"))
    """The numbers of the prompts whose first rollout is in this part."""


@dataclass(slots=True)
class RolloutCounts:
    """Counts of the rollouts that were written."""

    dropped: Counter[str] = field(default_factory=Counter[str])
    scores: Counter[str] = field(default_factory=Counter[str])
    smallest_reward: float = math.inf
    largest_reward: float = 0.0
    calls: Distribution = field(default_factory=Distribution)
    rewarded: int = 0
    branches: int = 0
    unlogged_turns: int = 0
    """The assistant turns that are not the reply of any logged call, and are not trained on."""
    ambiguous_prompts: int = 0
    """The prompts with different answers that are not known to be wrong."""
    unanswered_prompts: int = 0
    """The prompts whose rollouts are all wrong or truncated."""
    contradicted_prompts: int = 0
    """The prompts with a correct rollout that does not match the source's answer."""
    conflicting_feedback: int = 0
    """The rollouts whose feedback or copies of a call disagree on the value of a score."""
    differing_alternatives: int = 0
    """The rollouts whose scores differ between the alternatives of an `a|b` in `reward_from`."""
    changing_scores: int = 0
    """The rollouts whose calls have different values of a score."""
    reserved_addresses: int = 0
    """The rollouts with email addresses in domains reserved for examples."""
    empty_answers: int = 0
    """The rollouts whose last message is an answer without text."""
    later_system: int = 0
    """The rollouts with a system message after their first message."""


class RolloutWriter:
    """Writes rollouts and their prompts.

    The rows are kept in a temporary file until the last one is added: a task's id depends on its
    expected answer, which depends on all of its rollouts.
    """

    def __init__(
        self,
        collected: RowCollector,
        tally: ImportTally,
        spill: Spill,
        *,
        reward_from: Sequence[str] = (),
        infer_tools: bool = False,
    ) -> None:
        """`reward_from` names the scores whose mean is the reward; see `reward_of`."""
        self._collected, self._tally = collected, tally
        self._reward_from, self._infer_tools = reward_from, infer_tools
        self._spill, self._prompts = spill, PromptStore(spill)
        self._task_ids: dict[int, bytes] = {}
        self.counts = RolloutCounts()
        self._scales = RewardScales(reward_from)

    def add(self, rollout: ImportedRollout, feedback: Mapping[str, float], part: SplitPart) -> None:
        """Adds a rollout to a part. `feedback` has its scores from separate feedback rows."""
        kept, calls = rollout.kept, rollout.calls
        scores = {name: value for call in calls for name, value in call.scores.items()}
        named_values = _named_values(calls)
        self.counts.changing_scores += len(named_values) > len(scores)
        # Merging the copies of a call drops the scores on which they disagree.
        if add_lowest(scores, feedback) or _named_values(rollout.rows) != named_values:
            self._tally.conflicting_rows.add(rollout.row)
        self.counts.differing_alternatives += alternatives_differ(scores, self._reward_from)
        self._scales.add(scores, feedback)
        reward = reward_of(scores, self._reward_from)
        tools, tools_note = self._tools(rollout)
        dropped = [*rollout.dropped, *([tools_note] if tools_note else [])]
        last = msgspec.json.decode(rollout.messages[-1])
        self.counts.empty_answers += _is_empty_answer(last)
        row = rollout_row(
            rollout,
            last=last,
            tools=tools,
            scores=scores,
            reward=reward,
            origin=self._origin(rollout, dropped),
        )
        num_prompts = len(self._prompts)
        prompt, row["sample"] = self._prompts.add(rollout, row)
        if prompt == num_prompts:
            part.new_prompts.append(prompt)
        data = msgspec.json.encode(row)
        part.pending_rows.extend((self._spill.append(data), len(data), prompt))
        providers = {call.model: call.provider or UNKNOWN_PROVIDER for call in calls if call.model}
        part.models.update((provider, model) for model, provider in providers.items())
        self._count(rollout, dropped, scores, reward)
        for stored in rollout.rows:
            self._tally.count_merged(stored.format, len(stored.merged_from) + (stored is not kept))
        self._tally.count_kept(kept.format)

    def check_rewards(self) -> None:
        """Raises InputError if the scores do not say which rollouts are a success."""
        self._scales.check()

    def write(self, parts: Sequence[SplitPart]) -> None:
        """Writes the rows and prompts of each part to that part's files."""
        for part in parts:
            self.assign_task_ids(part)
        for part in parts:
            for row in self.rows_of(part):
                if part.rows is not None:
                    part.rows.write_raw(row)
        self.counts.ambiguous_prompts = self._prompts.num_ambiguous
        self.counts.unanswered_prompts = self._prompts.num_unanswered
        self.counts.contradicted_prompts = self._prompts.num_contradicted
        self.counts.conflicting_feedback = len(self._tally.conflicting_rows)

    def assign_task_ids(self, part: SplitPart) -> None:
        """Assigns task ids to a part's prompts, and writes the prompts."""
        for number in part.new_prompts:
            prompt = self._prompts.prompt(number)
            self._task_ids[number] = task_from_row(prompt).task_id.encode()
            if part.prompts is not None:
                part.prompts.write(prompt)

    def rows_of(self, part: SplitPart) -> Iterator[bytes]:
        """Yields the rows of a part, in the order in which they were added."""
        pending = iter(part.pending_rows)
        for offset, size, number in zip(pending, pending, pending, strict=True):
            row = self._spill.read(offset, size)
            end = row.index(_TASK_ID) + len(_TASK_ID)
            yield row[:end] + self._task_ids[number] + row[end:]

    def _count(
        self,
        rollout: ImportedRollout,
        dropped: list[str],
        scores: Mapping[str, float],
        reward: float | None,
    ) -> None:
        """Adds a rollout to the counts."""
        counts = self.counts
        counts.dropped.update(dropped)
        counts.scores.update(scores.keys())
        if reward is not None:
            counts.smallest_reward = min(counts.smallest_reward, reward)
            counts.largest_reward = max(counts.largest_reward, reward)
            counts.rewarded += 1
        counts.branches += rollout.branch_of is not None
        counts.unlogged_turns += rollout.num_unlogged_turns
        counts.later_system += any(message.startswith(_SYSTEM) for message in rollout.messages[1:])
        counts.reserved_addresses += any(
            b"@" in message and has_reserved_address(message.decode())
            for message in rollout.messages
        )
        counts.calls.add(len(rollout.calls))

    def _tools(self, rollout: ImportedRollout) -> tuple[list[dict[str, Any]], str | None]:
        """Returns a rollout's tools, and a note if they may differ from those its model had."""
        numbers = [stored.tools for stored in rollout.rows if stored.tools != NONE]
        if numbers:
            note = TOOLS_CHANGED if len(set(numbers)) > 1 else None
            return self._collected.tools.union_of(numbers), note
        called = list(_called_tools(rollout))
        if not called:
            return [], None
        if not self._infer_tools:
            return [], TOOLS_UNKNOWN
        return self._collected.inferred.schemas(called), TOOLS_INFERRED

    def _origin(self, rollout: ImportedRollout, dropped: list[str]) -> dict[str, Any]:
        """Returns the field `origin` of a rollout's row: where it comes from."""
        kept = rollout.kept
        others = [stored.source for stored in rollout.rows[:-1]]
        others += [location for stored in rollout.rows for location in stored.merged_from]
        branch_of = rollout.branch_of
        origin = {
            "format": kept.format,
            "source": kept.source,
            "sources": others,
            "id": kept.id,
            "group": kept.group,
            "calls": len(rollout.calls),
            "branch_of": None
            if branch_of is None
            else rollout_id(self._collected.rows.stored_row(branch_of)),
            "losses": dropped,
        }
        return {name: value for name, value in origin.items() if value not in (None, [])}


def _named_values(rows: Sequence[StoredRow]) -> set[tuple[str, float]]:
    """Returns the names and values of the scores of rows."""
    return {item for row in rows for item in row.scores.items()}


def _is_empty_answer(message: Mapping[str, Any]) -> bool:
    """Whether a message is of the assistant, and has neither text nor a tool call."""
    has_text = bool(str(message.get("content") or "").strip())
    return message["role"] == "assistant" and not has_text and not message.get("tool_calls")


def _called_tools(rollout: ImportedRollout) -> Iterator[str]:
    """Yields the name of the tool in each tool call of a rollout."""
    for message in rollout.messages:
        if _CALLS in message:
            for call in msgspec.json.decode(message).get("tool_calls", ()):
                yield call["function"]["name"]
