"""Writes imported rollouts as rows in Stillroom's format, with scores, origin and reward."""

import math
from array import array
from collections import Counter, defaultdict
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
from stillroom.importing.conversations.rollouts import ImportedRollout, JoinedRows
from stillroom.importing.conversations.row_table import StoredRow, hash_of_id
from stillroom.importing.output.prompts import WaitingPrompts
from stillroom.importing.payloads.fields import iso_time, seconds_between
from stillroom.importing.records import Refusal
from stillroom.importing.spill import Spill
from stillroom.importing.tally import ImportTally
from stillroom.rollout.rewards.rewards import SUCCESS_THRESHOLD
from stillroom.types import Answerer, StopReason, Usage, total_usd

_LONGEST_ERROR = 500
UNKNOWN_PROVIDER = "unknown"
"""The provider if the source does not name it."""


def rollout_id(row: StoredRow) -> str:
    """Returns the id of a rollout, a hash of its kept row's place."""
    return content_hash([row.format, row.source])


def rollout_row(
    rollout: ImportedRollout,
    *,
    tools: Sequence[Mapping[str, Any]],
    scores: Mapping[str, float],
    reward: float | None,
    origin: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the row of a rollout without its task; fields that the source lacks are left out."""
    kept = rollout.kept
    last = msgspec.json.decode(rollout.messages[-1])
    is_cut = kept.finish_reason == "length"
    is_failed = kept.error is not None and not (kept.failure and kept.failure.is_of_reward)
    stop = infer_stop_reason([last], is_failed=is_failed, is_truncated=is_cut)
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
        "error": _failure(kept),
        "cost_usd": total_usd(call.cost_usd for call in rollout.calls),
    }
    return row | _optional_fields(rollout.calls) | {"origin": origin}


def _failure(kept: StoredRow) -> dict[str, str] | None:
    if kept.error is None:
        return None
    return {"class": kept.failure or FailureClass.INTERNAL, "message": kept.error[:_LONGEST_ERROR]}


def _optional_fields(calls: Sequence[StoredRow]) -> dict[str, Any]:
    """Returns the fields of a row that only some sources have."""
    usages = [each.usage for each in calls if each.usage is not None]
    start = iso_time(next((each.started_at for each in calls if each.started_at), None))
    named = [each for each in calls if each.model is not None]
    known: dict[str, Any] = {}
    if usages:
        known["usage"] = Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
        )
    if named:
        last = named[-1]
        teacher = {
            "provider": last.provider or UNKNOWN_PROVIDER,
            "model": last.model,
            "settings": {},
        }
        known["teacher"] = teacher
        models = dict.fromkeys(each.model for each in named if each.model is not None)
        known["answered_by"] = [Answerer(model=model) for model in models]
    if start is not None:
        known["started_at"] = start
    if (duration := _duration(calls)) is not None:
        known["duration_s"] = duration
    return known


def _duration(calls: Sequence[StoredRow]) -> float | None:
    """Returns the seconds from the start of the first call to the end of the last one."""
    first, last = calls[0], calls[-1]
    if last.duration_s is None or len(calls) == 1:
        return last.duration_s
    passed = seconds_between(first.started_at, last.started_at)
    return None if passed is None else round(passed + last.duration_s, 3)


UNKNOWN, INFERRED, CHANGED = "tools not logged", "tools inferred", "tools changed between calls"
_CALLS, _TASK_ID, _SYSTEM = b'"tool_calls":', b'"task_id":"', b'{"role":"system"'


@dataclass(slots=True)
class RolloutSide:
    """One side of the split, or all rollouts: its files, and its rows by model."""

    rows: LineWriter | None = None
    prompts: LineWriter | None = None
    models: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """The number of rows by provider and model."""
    waiting: "array[int]" = field(default_factory=lambda: array("q"))
    """For each waiting row: its position, its size and its prompt's number."""
    new_prompts: "array[int]" = field(default_factory=lambda: array("q"))
    """The numbers of the prompts whose first rollout is on this side."""


@dataclass(slots=True)
class RolloutCounts:
    """Counts of the rollouts that were written."""

    losses: Counter[str] = field(default_factory=Counter[str])
    scores: Counter[str] = field(default_factory=Counter[str])
    largest_reward: float = 0.0
    calls: Distribution = field(default_factory=Distribution)
    rewarded: int = 0
    branches: int = 0
    unanswered: int = 0
    """The assistant turns that are no reply of a logged call, and are not trained on."""
    differently_answered: int = 0
    """The prompts whose correct answers differ."""
    unanswered_prompts: int = 0
    """The prompts whose rollouts are all wrong or truncated."""
    contradicted: int = 0
    """The prompts with a correct rollout that does not match the source's answer."""
    disagreeing: int = 0
    """The rollouts with two values of one score, of which one is feedback."""
    later_system: int = 0
    """The rollouts with a system message after their first message."""


class RolloutWriter:
    """Writes rollouts and their prompts.

    All rows wait in a temporary file: a task's id depends on its expected answer, which depends on
    all of its rollouts.
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
        """`reward_from` names the scores whose mean is the reward."""
        self._collected, self._tally = collected, tally
        self._reward_from, self._infer_tools = reward_from, infer_tools
        self._spill, self._prompts = spill, WaitingPrompts(spill)
        self._task_ids: dict[int, bytes] = {}
        self.counts = RolloutCounts()

    def take(
        self, rollout: ImportedRollout, feedback: Mapping[str, float], side: RolloutSide
    ) -> None:
        """Adds a rollout to a side. `feedback` has the scores from separate feedback rows."""
        kept, calls = rollout.kept, rollout.calls
        scores = {name: value for call in calls for name, value in call.scores.items()}
        if any(scores.get(name, value) != value for name, value in feedback.items()):
            self._tally.disagreeing.add(rollout.row)
        scores |= feedback
        reward = reward_of(scores, self._reward_from)
        tools, state = self._tools(rollout)
        losses = [*rollout.losses, *([state] if state else [])]
        row = rollout_row(
            rollout,
            tools=tools,
            scores=scores,
            reward=reward,
            origin=self._origin(rollout, losses),
        )
        num_prompts = len(self._prompts)
        prompt, row["sample"] = self._prompts.take(rollout, row)
        if prompt == num_prompts:
            side.new_prompts.append(prompt)
        data = msgspec.json.encode(row)
        side.waiting.extend((self._spill.append(data), len(data), prompt))
        providers = {call.model: call.provider or UNKNOWN_PROVIDER for call in calls if call.model}
        side.models.update((provider, model) for model, provider in providers.items())
        self._count(rollout, losses, scores, reward)
        for each in rollout.rows:
            self._tally.merge(each.format, len(each.also_at) + (each is not kept))
        self._tally.keep(kept.format)

    def write(self, sides: Sequence[RolloutSide]) -> None:
        """Writes the collected rows and prompts of each side to that side's files."""
        for side in sides:
            self.assign_task_ids(side)
        for side in sides:
            for row in self.rows_of(side):
                if side.rows is not None:
                    side.rows.write_raw(row)
        self.counts.differently_answered = self._prompts.num_different
        self.counts.unanswered_prompts = self._prompts.num_unanswered
        self.counts.contradicted = self._prompts.num_contradicted
        self.counts.disagreeing = len(self._tally.disagreeing)

    def assign_task_ids(self, side: RolloutSide) -> None:
        """Assigns task ids to a side's prompts, and writes the prompts."""
        for number in side.new_prompts:
            prompt = self._prompts.prompt(number)
            self._task_ids[number] = task_from_row(prompt).task_id.encode()
            if side.prompts is not None:
                side.prompts.write(prompt)

    def rows_of(self, side: RolloutSide) -> Iterator[bytes]:
        """Yields the rows of a side, in the order in which they were added."""
        waiting = iter(side.waiting)
        for place, size, number in zip(waiting, waiting, waiting, strict=True):
            row = self._spill.read(place, size)
            end = row.index(_TASK_ID) + len(_TASK_ID)
            yield row[:end] + self._task_ids[number] + row[end:]

    def _count(
        self,
        rollout: ImportedRollout,
        losses: list[str],
        scores: Mapping[str, float],
        reward: float | None,
    ) -> None:
        counts = self.counts
        counts.losses.update(losses)
        counts.scores.update(scores.keys())
        if reward is not None:
            counts.largest_reward = max(counts.largest_reward, reward)
            counts.rewarded += 1
        counts.branches += rollout.branch_of is not None
        counts.unanswered += rollout.num_unanswered
        counts.later_system += any(one.startswith(_SYSTEM) for one in rollout.messages[1:])
        counts.calls.add(len(rollout.calls))

    def _tools(self, rollout: ImportedRollout) -> tuple[list[dict[str, Any]], str | None]:
        """Returns the tools that a rollout was offered, and what was lost from them, if any."""
        numbers = [each.tools for each in rollout.rows if each.tools != NONE]
        if numbers:
            state = CHANGED if len(set(numbers)) > 1 else None
            return self._collected.tools.union_of(numbers), state
        called = list(_called_tools(rollout))
        if not called:
            return [], None
        if not self._infer_tools:
            return [], UNKNOWN
        return self._collected.inferred.schemas(called), INFERRED

    def _origin(self, rollout: ImportedRollout, losses: list[str]) -> dict[str, Any]:
        kept = rollout.kept
        others = [each.source for each in rollout.rows[:-1]]
        others += [place for each in rollout.rows for place in each.also_at]
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
            "losses": losses,
        }
        return {name: value for name, value in origin.items() if value not in (None, [])}


def _called_tools(rollout: ImportedRollout) -> Iterator[str]:
    """Yields the names of the tools that a rollout calls."""
    for message in rollout.messages:
        if _CALLS in message:
            for call in msgspec.json.decode(message).get("tool_calls", ()):
                yield call["function"]["name"]


_PREFIX = ".score."
_OWN_REWARDS = ("reward", "preferred")
"""The scores that are rewards in their source: an environment's, and those of preference pairs."""


def scores_from_feedback(
    collected: RowCollector, joined: JoinedRows, tally: ImportTally, *, by: str | None = None
) -> dict[int, dict[str, float]]:
    """Returns the scores from feedback rows, by kept row.

    Feedback on a row applies to its rollout, and feedback on a group to all rollouts of the group.
    An id that is neither is looked up in the additional ids and metadata of rows; with `by`, ids
    are looked up in that field only. The last score of a name wins; `tally` has the rollouts for
    which another one differs. Feedback without a matching rollout is refused.
    """
    scores: defaultdict[int, dict[str, float]] = defaultdict(dict)
    if not collected.feedback:
        return scores
    wanted = {hash_of_id(feedback.about) for _, feedback in collected.feedback}
    feedback_targets: defaultdict[int, set[int]] = defaultdict(set)
    for key, row in collected.rows.feedback_targets() if by is None else ():
        if key in wanted:
            feedback_targets[key].add(joined.owners[row])
    missing = wanted - feedback_targets.keys()
    for key, row in collected.rows.field_targets():
        if key in missing:
            feedback_targets[key].add(joined.owners[row])
    fields = ", ".join(
        [*(["id", "session", "trace"] if by is None else []), *collected.rows.id_fields]
    )
    for name, feedback in collected.feedback:
        rollouts = feedback_targets.get(hash_of_id(feedback.about), ())
        if not rollouts or not math.isfinite(feedback.value):
            reason = "score is not finite" if rollouts else "feedback about no call that was kept"
            detail = (
                f"{feedback.about} was not found in: {fields or by}; set feedback_by to its field"
            )
            refusal = Refusal(feedback.place, reason, feedback.about if rollouts else detail)
            tally.refuse(name, refusal, is_read=True)
            continue
        tally.merge(name)
        for row in rollouts:
            if scores[row].get(feedback.name, feedback.value) != feedback.value:
                tally.disagreeing.add(row)
            scores[row][feedback.name] = feedback.value
    return scores


def reward_of(scores: Mapping[str, float], names: Sequence[str]) -> float | None:
    """Returns the mean of the named scores, or None if one of them is missing.

    A name may be prefixed by its system, as in `langfuse.score.helpful`, and may list
    alternatives, of which the first present one counts, as in `thumbs|rating`. Without names, the
    score that is a reward in its source is used, if there is one.
    """
    if not names:
        return next((scores[name] for name in _OWN_REWARDS if name in scores), None)
    found = [score for name in names if (score := _named_score(scores, name)) is not None]
    return sum(found) / len(found) if len(found) == len(names) else None


def _named_score(scores: Mapping[str, float], names: str) -> float | None:
    for name in (names, *names.split("|")):
        for plain in (name, name.rpartition(_PREFIX)[2]):
            if plain in scores:
                return scores[plain]
    return None
