"""Stores the prompts of an import until all their rollouts are read."""

from array import array
from collections.abc import Mapping
from typing import Any

import msgspec

from stillroom.errors import DataError
from stillroom.importing.conversations.rollouts import ImportedRollout
from stillroom.importing.records import IMPORTED_FROM
from stillroom.importing.spill import Spill
from stillroom.rollout.rewards.answers import strip_thinking
from stillroom.rollout.rewards.matchers import answer_key, as_expected_answer, is_accepted
from stillroom.types import StopReason

_UNTRAINED = b',"weight":0}'
_EXPECTED = "expected_answer"
_NO_ANSWER, _FROM_SOURCE, _AGREED, _AMBIGUOUS = range(4)
"""The state of a prompt's expected answer: no correct answer yet, given by the source, all correct
answers agree, or correct answers differ."""
_UNSCORED = float("-inf")


class PromptStore:
    """The distinct prompts of an import, in a temporary file with a few numbers of each in memory.

    A prompt has the metadata of its first rollout. Its expected answer is the source's, or the
    answer of its rollouts with the best reward (of the unscored ones if none is scored), provided
    that these agree.
    """

    def __init__(self, spill: Spill) -> None:
        self._spill = spill
        # The number of each prompt by the hash of its messages; then one element per prompt.
        self._numbers: dict[int, int] = {}
        self._counts, self._states = array("q"), bytearray()
        self._offsets, self._sizes, self._metadata_sizes = array("q"), array("q"), array("q")
        self._answer_offsets, self._answer_sizes = array("q"), array("q")
        self._rewards = array("d")
        self._contradicted = set[int]()

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def num_ambiguous(self) -> int:
        """The number of prompts with different answers that are not known to be wrong."""
        return self._states.count(_AMBIGUOUS)

    @property
    def num_unanswered(self) -> int:
        """The number of prompts without a correct answer in the log."""
        return self._states.count(_NO_ANSWER)

    @property
    def num_contradicted(self) -> int:
        """The number of prompts with a correct rollout that does not match the source's answer."""
        return len(self._contradicted)

    def add(self, rollout: ImportedRollout, row: Mapping[str, Any]) -> tuple[int, int]:
        """Adds a rollout; returns its prompt's number and its index among the prompt's rollouts."""
        messages = rollout.messages[: rollout.num_prompt_messages]
        data = b",".join(_as_prompt(message) for message in messages)
        number = self._numbers.setdefault(hash(data), len(self))
        if number == len(self):
            self._store(data, rollout)
        sample = self._counts[number]
        self._counts[number] += 1
        if (answer := _correct_answer(rollout, row)) is not None:
            reward = row["reward"]
            self._update_answer(number, answer, _UNSCORED if reward is None else reward)
        return number, sample

    def prompt(self, number: int) -> dict[str, Any]:
        """Returns a prompt's row, with its expected answer if there is one."""
        offset, size = self._offsets[number], self._sizes[number]
        messages = msgspec.json.decode(b"[" + self._spill.read(offset, size) + b"]")
        metadata = self._metadata(number)
        if self._states[number] == _AGREED:
            with_answer = {**metadata, _EXPECTED: as_expected_answer(self._answer(number))}
            metadata = with_answer if _is_usable(with_answer) else metadata
        return {"messages": messages, "metadata": metadata}

    def _store(self, data: bytes, rollout: ImportedRollout) -> None:
        """Stores a new prompt, with the metadata of its first rollout."""
        metadata: dict[str, Any] = msgspec.json.decode(rollout.metadata)
        metadata[IMPORTED_FROM] = rollout.kept.source
        encoded = msgspec.json.encode(metadata)
        self._offsets.append(self._spill.append(data + encoded))
        self._sizes.append(len(data))
        self._metadata_sizes.append(len(encoded))
        self._answer_offsets.append(0)
        self._answer_sizes.append(0)
        self._rewards.append(_UNSCORED)
        self._counts.append(0)
        self._states.append(_FROM_SOURCE if _EXPECTED in metadata else _NO_ANSWER)

    def _update_answer(self, number: int, answer: str, reward: float) -> None:
        """Updates a prompt's expected answer with the correct answer of another rollout."""
        state, best = self._states[number], self._rewards[number]
        if state == _FROM_SOURCE:
            if reward != _UNSCORED and number not in self._contradicted:
                metadata = self._metadata(number)
                if not _accepts(metadata, metadata[_EXPECTED], answer):
                    self._contradicted.add(number)
            return
        if state != _NO_ANSWER and reward < best:
            return
        if state == _NO_ANSWER or reward > best:
            self._set_answer(number, answer, reward)
        elif state == _AGREED and answer != (expected := self._answer(number)):
            metadata = self._metadata(number)
            if _accepts(metadata, as_expected_answer(expected), answer):
                return
            if _accepts(metadata, as_expected_answer(answer), expected):
                self._set_answer(number, answer, reward)
            else:
                self._states[number] = _AMBIGUOUS

    def _set_answer(self, number: int, answer: str, reward: float) -> None:
        data = answer.encode()
        self._answer_offsets[number] = self._spill.append(data)
        self._answer_sizes[number] = len(data)
        self._rewards[number], self._states[number] = reward, _AGREED

    def _answer(self, number: int) -> str:
        offset, size = self._answer_offsets[number], self._answer_sizes[number]
        return self._spill.read(offset, size).decode()

    def _metadata(self, number: int) -> dict[str, Any]:
        offset = self._offsets[number] + self._sizes[number]
        return msgspec.json.decode(self._spill.read(offset, self._metadata_sizes[number]))


def _as_prompt(message: bytes) -> bytes:
    """Returns a message without the weight 0 of assistant turns that are context."""
    if message.endswith(_UNTRAINED):
        return message.removesuffix(_UNTRAINED) + b"}"
    return message


def _correct_answer(rollout: ImportedRollout, row: Mapping[str, Any]) -> str | None:
    """Returns a rollout's final answer; None if it is wrong, failed or truncated."""
    if row["stop_reason"] is not StopReason.ANSWERED or row["success"] is False:
        return None
    return strip_thinking(msgspec.json.decode(rollout.messages[-1]).get("content") or "") or None


def _accepts(metadata: Mapping[str, Any], expected: Any, answer: str) -> bool:
    """Returns whether an answer matches an expected one, by the rules of evaluate_model."""
    try:
        key = answer_key({**metadata, _EXPECTED: expected})
    except DataError:
        return False
    return key is not None and is_accepted(answer, key)


def _is_usable(metadata: Mapping[str, Any]) -> bool:
    try:
        answer_key(metadata)
    except DataError:
        return False  # too long for an answer to be matched
    return True
