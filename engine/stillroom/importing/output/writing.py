"""Writes the rollouts of an import, their prompts, and what is counted of them."""

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from stillroom.data.distribution import Distribution
from stillroom.data.formats import task_from_row
from stillroom.files import LineWriter
from stillroom.importing.joining.call_tree import NONE
from stillroom.importing.joining.intake import Intake
from stillroom.importing.joining.rollouts import ImportedRollout
from stillroom.importing.joining.spill import Spill
from stillroom.importing.output.feedback import reward_of
from stillroom.importing.output.prompts import WaitingPrompts
from stillroom.importing.output.rows import rollout_id, rollout_row
from stillroom.importing.request import ImportRollouts
from stillroom.importing.tally import ImportTally

UNKNOWN, INFERRED, CHANGED = "tools not logged", "tools inferred", "tools changed between calls"
_CALLS, _TASK_ID = b'"tool_calls":', b'"task_id":"'


@dataclass(slots=True)
class RolloutSide:
    """One side of the split, or the whole: its files, and the models that answered its rows."""

    rows: LineWriter
    prompts: LineWriter | None
    models: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """The number of rows by provider (or format) and model."""
    waiting: "array[int]" = field(default_factory=lambda: array("q"))
    """Of each row that waits its place, its bytes and the number of its prompt."""
    new_prompts: "array[int]" = field(default_factory=lambda: array("q"))
    """The numbers of the prompts that a row of this side was the first to answer."""


@dataclass(slots=True)
class RolloutCounts:
    """What is counted of the rollouts that were written."""

    losses: Counter[str] = field(default_factory=Counter[str])
    scores: Counter[str] = field(default_factory=Counter[str])
    largest_reward: float = 0.0
    calls: Distribution = field(default_factory=Distribution)
    rewarded: int = 0
    branches: int = 0
    unanswered: int = 0
    """The assistant's turns that no call of the sources answered, which are not trained."""
    differently_answered: int = 0
    """The prompts whose right answers do not match."""
    unanswered_prompts: int = 0
    """The prompts that no rollout answers, but for those that were judged wrong or are cut."""
    contradicted: int = 0
    """The prompts whose source holds an answer that a rollout judged right does not have."""


class RolloutWriter:
    """Writes rollouts and their prompts.

    All rows wait in a temporary file, since the id of a task follows from its expected answer, and
    that from all of its rollouts.
    """

    def __init__(
        self, request: ImportRollouts, intake: Intake, tally: ImportTally, spill: Spill
    ) -> None:
        self._request, self._intake, self._tally = request, intake, tally
        self._spill, self._prompts = spill, WaitingPrompts(spill)
        self.counts = RolloutCounts()

    def take(
        self, rollout: ImportedRollout, feedback: Mapping[str, float], side: RolloutSide
    ) -> None:
        """Takes one rollout for its side. `feedback` are scores from rows of their own."""
        facts, kept = rollout.facts, rollout.kept
        scores = {name: value for each in facts for name, value in each.scores.items()}
        scores |= feedback
        reward = reward_of(scores, self._request.reward_from)
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
        for each in dict.fromkeys((f.provider or f.format, f.model) for f in facts if f.model):
            side.models[each[0], each[1] or ""] += 1
        self._count(rollout, losses, scores, reward)
        for each in facts:
            self._tally.merge(each.format, len(each.also_at) + (each is not kept))
        self._tally.keep(kept.format)

    def write(self, sides: Sequence[RolloutSide]) -> None:
        """Writes what was taken to the files of its side."""
        ids = [""] * len(self._prompts)
        for side in sides:
            for number in side.new_prompts:
                prompt = self._prompts.prompt(number)
                ids[number] = task_from_row(prompt).task_id
                if side.prompts is not None:
                    side.prompts.write(prompt)
        for side in sides:
            waiting = iter(side.waiting)
            for place, size, number in zip(waiting, waiting, waiting, strict=True):
                row = self._spill.read(place, size)
                end, view = row.index(_TASK_ID) + len(_TASK_ID), memoryview(row)
                side.rows.write_raw(view[:end], ids[number].encode(), view[end:])
        self.counts.differently_answered = self._prompts.num_different
        self.counts.unanswered_prompts = self._prompts.num_unanswered
        self.counts.contradicted = self._prompts.num_contradicted

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
        counts.calls.add(len(rollout.facts))

    def _tools(self, rollout: ImportedRollout) -> tuple[list[dict[str, Any]], str | None]:
        """Returns the tools that a rollout was offered, and what is to be said of them."""
        numbers = [each.tools for each in rollout.facts if each.tools != NONE]
        if numbers:
            state = CHANGED if len(set(numbers)) > 1 else None
            return self._intake.tools.united(numbers), state
        called = list(_called(rollout))
        if not called:
            return [], None
        if not self._request.infer_tools:
            return [], UNKNOWN
        return self._intake.inferred.schemas(called), INFERRED

    def _origin(self, rollout: ImportedRollout, losses: list[str]) -> dict[str, Any]:
        kept = rollout.kept
        others = [each.source for each in rollout.facts[:-1]]
        others += [place for each in rollout.facts for place in each.also_at]
        branch_of = rollout.branch_of
        origin = {
            "format": kept.format,
            "source": kept.source,
            "sources": others,
            "id": kept.id,
            "group": kept.group,
            "calls": len(rollout.facts),
            "branch_of": None
            if branch_of is None
            else rollout_id(self._intake.rows.facts(branch_of)),
            "losses": losses,
        }
        return {name: value for name, value in origin.items() if value not in (None, [])}


def _called(rollout: ImportedRollout) -> Iterator[str]:
    """Yields the names of the tools that a rollout calls."""
    for piece in rollout.pieces:
        if _CALLS in piece:
            for call in msgspec.json.decode(piece).get("tool_calls", ()):
                yield call["function"]["name"]
