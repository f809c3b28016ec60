"""Writes the rollouts of an import, their prompts, and what is counted of them."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from stillroom.data.distribution import Distribution
from stillroom.data.formats import task_from_row
from stillroom.errors import DataError
from stillroom.files import LineWriter
from stillroom.importing.joining.call_tree import NONE
from stillroom.importing.joining.intake import Intake
from stillroom.importing.joining.rollouts import ImportedRollout
from stillroom.importing.output.feedback import reward_of
from stillroom.importing.output.rows import rollout_id, rollout_row
from stillroom.importing.places import IMPORTED_FROM
from stillroom.importing.request import ImportRollouts
from stillroom.importing.tally import ImportTally
from stillroom.rollout.rewards.matchers import answer_key
from stillroom.types import StopReason

UNKNOWN, INFERRED, CHANGED = "tools not logged", "tools inferred", "tools changed between calls"
_UNTRAINED = b',"weight":0}'
_CALLS = b'"tool_calls":'


@dataclass(slots=True)
class RolloutSide:
    """One side of the split, or the whole: its files, and the models that answered its rows."""

    rows: LineWriter
    prompts: LineWriter | None
    models: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """The number of rows by provider (or format) and model."""


@dataclass(slots=True)
class RolloutCounts:
    """What is counted of the rollouts that were written."""

    losses: Counter[str] = field(default_factory=Counter[str])
    scores: Counter[str] = field(default_factory=Counter[str])
    largest_score: float = 0.0
    calls: Distribution = field(default_factory=Distribution)
    rewarded: int = 0
    branches: int = 0
    unanswered: int = 0
    """The assistant's turns that no call of the sources answered, which are not trained."""


class RolloutWriter:
    """Writes rollouts one by one, each with its prompt if that is new."""

    def __init__(self, request: ImportRollouts, intake: Intake, tally: ImportTally) -> None:
        self._request, self._intake, self._tally = request, intake, tally
        self._tasks: dict[int, tuple[str, int]] = {}
        self.counts = RolloutCounts()

    def write(
        self, rollout: ImportedRollout, feedback: Mapping[str, float], side: RolloutSide
    ) -> None:
        """Writes one rollout to its side. `feedback` are scores from rows of their own."""
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
        task_id, sample = self._task(rollout, row, side)
        row |= {"task_id": task_id, "sample": sample}
        side.rows.write(row)
        for each in dict.fromkeys((f.provider or f.format, f.model) for f in facts if f.model):
            side.models[each[0], each[1] or ""] += 1
        self._count(rollout, losses, scores, reward)
        for each in facts:
            self._tally.merge(each.format, len(each.also_at) + (each is not kept))
        self._tally.keep(kept.format)

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
        counts.largest_score = max(counts.largest_score, *scores.values(), 0.0)
        counts.rewarded += reward is not None
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

    def _task(
        self, rollout: ImportedRollout, row: dict[str, Any], side: RolloutSide
    ) -> tuple[str, int]:
        """Returns the id of a rollout's task and its number there; writes the prompt if it is new.

        The first rollout of a prompt decides the metadata of its task.
        """
        pieces = rollout.pieces[: rollout.num_prompt]
        data = b",".join(_as_prompt(piece) for piece in pieces)
        key = hash(data)
        if (known := self._tasks.get(key)) is not None:
            task_id, count = known
        else:
            prompt = {
                "messages": msgspec.json.decode(b"[" + data + b"]"),
                "metadata": _prompt_metadata(rollout, row),
            }
            task_id, count = task_from_row(prompt).task_id, 0
            if side.prompts is not None:
                side.prompts.write(prompt)
        self._tasks[key] = (task_id, count + 1)
        return task_id, count


def _as_prompt(piece: bytes) -> bytes:
    return piece.removesuffix(_UNTRAINED) + b"}" if piece.endswith(_UNTRAINED) else piece


def _prompt_metadata(rollout: ImportedRollout, row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a rollout's metadata, with its answer as the expected one if it may serve as one."""
    metadata: dict[str, Any] = msgspec.json.decode(rollout.metadata)
    is_right = row["stop_reason"] is StopReason.ANSWERED and row["success"] is not False
    metadata[IMPORTED_FROM] = rollout.kept.source
    answer = msgspec.json.decode(rollout.pieces[-1]).get("content")
    if "expected_answer" in metadata or not is_right or not answer:
        return metadata
    with_answer = {**metadata, "expected_answer": answer}
    try:
        answer_key(with_answer)
    except DataError:
        return metadata  # a text as long as that is no answer that could be matched
    return with_answer


def _called(rollout: ImportedRollout) -> Iterator[str]:
    """Yields the names of the tools that a rollout calls."""
    for piece in rollout.pieces:
        if _CALLS in piece:
            for call in msgspec.json.decode(piece).get("tool_calls", ()):
                yield call["function"]["name"]
