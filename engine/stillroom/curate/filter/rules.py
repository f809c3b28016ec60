"""The filters that judge each row by itself.

`_fact_rules` and `_row_rules` list the filters that a request asks for. To add a filter, add a
function to one of them, and its option to request.py. `RowJudge` applies the filters to one row
after the other.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, cast

import msgspec

from stillroom.curate.facts import SUPERVISED, RowFacts
from stillroom.curate.filter.contamination import (
    LEVELS,
    ContaminationIndex,
    ContaminationLevel,
)
from stillroom.curate.filter.request import ANY_TOOL, FilterDataset
from stillroom.curate.rows import CuratedRow
from stillroom.curate.verdicts import RowVerdicts
from stillroom.data.chat.render import ChatRenderer
from stillroom.data.words import (
    LanguageDetector,
    content_text,
    final_answer,
    strings_in,
    user_texts,
)
from stillroom.errors import DataError, ModelError
from stillroom.secrecy.patterns import PERSONAL_DATA, SECRETS, SensitiveKind, kinds_in
from stillroom.types import Message


@dataclass(frozen=True, slots=True)
class Reason:
    """The reason why a row is dropped."""

    text: str
    """The reason in words. Dropped rows are counted by it, so it must take only a few values."""
    like: str | None = None
    """The `file:line` of the row or evaluation prompt that the row repeats; None if it does not."""


Reasons = tuple[Reason, ...]
_NOT_A_ROW = Reason("not a rollout or SFT row")
TOO_DEEP = Reason("nested too deeply")
CONTAMINATED: dict[ContaminationLevel, str] = {
    "exact": "evaluation prompt",
    "contained": "evaluation prompt, contained",
    "near": "evaluation prompt, slightly changed",
}
"""The reasons of decontamination, by level."""


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What some filters must know beyond the row that they judge."""

    renderer: ChatRenderer | None = None
    """The chat renderer of the student, which counts tokens; None if no model is named."""
    success_rates: Mapping[str, float] = field(default_factory=dict[str, float])
    """The share of successful rollouts by task, for the tasks where it is known."""
    evaluation: ContaminationIndex | None = None
    verdicts: RowVerdicts = field(default_factory=RowVerdicts)
    """The verdicts of the review; none unless the request names a file with them."""


_FactRule = Callable[[RowFacts], Reason | None]
_RowRule = Callable[[CuratedRow], Reason | None]


class RowJudge:
    """Judges one row after the other by itself."""

    def __init__(self, request: FilterDataset, known: Knowledge) -> None:
        self._fact_rules = _fact_rules(request)
        self._row_rules = _row_rules(request, known)

    def reasons(self, row: CuratedRow) -> Reasons:
        """Returns the reasons to drop a row; none if the row passes."""
        facts = row.facts
        if facts is None:
            return (_NOT_A_ROW,)
        reasons: list[Reason] = []
        # A comprehension would cost as much as the rules.
        for fact_rule in self._fact_rules:
            if (reason := fact_rule(facts)) is not None:
                reasons.append(reason)  # noqa: PERF401
        if not self._row_rules:
            return tuple(reasons)
        try:
            reasons += [reason for rule in self._row_rules if (reason := rule(row)) is not None]
        except (msgspec.DecodeError, RecursionError):
            reasons.append(TOO_DEEP)
        return tuple(reasons)


def success_of(facts: RowFacts) -> bool | None:
    """Returns whether a row is a success; None for a supervised row without success and reward."""
    is_stated = facts.success is not None or facts.reward is not None
    return facts.is_success if is_stated or facts.stop_reason != SUPERVISED else None


def _fact_rules(request: FilterDataset) -> list[_FactRule]:
    """Returns those filters of a request that need only the facts of a row."""
    rules: list[_FactRule] = []
    if request.min_reward is not None:
        rules.append(_reward_rule(request.min_reward))
    if request.success is not None:
        rules.append(_success_rule(is_wanted=request.success))
    if request.min_turns is not None or request.max_turns is not None:
        rules.append(_turns_rule(request.min_turns, request.max_turns))
    if request.require_final_answer:
        no_answer = Reason("no final answer")
        rules.append(lambda facts: None if facts.has_final_answer else no_answer)
    if (tool := request.require_tool_use) is not None:
        unused = Reason(f"tool use missing ({tool})")
        rules.append(lambda facts: None if _uses(facts, tool) else unused)
    if request.only_tools:
        known, others = frozenset(request.only_tools), Reason("calls other tools")
        rules.append(lambda facts: None if facts.tools_used <= known else others)
    if request.max_tool_errors is not None:
        rules.append(_tool_error_rule(request.max_tool_errors))
    return rules


def _reward_rule(min_reward: float) -> _FactRule:
    absent, low = Reason("no reward"), Reason(f"reward below {min_reward:g}")

    def judge(facts: RowFacts) -> Reason | None:
        if facts.reward is None:
            return absent
        return None if facts.reward >= min_reward else low

    return judge


def _success_rule(*, is_wanted: bool) -> _FactRule:
    unknown = Reason("success unknown")
    opposite = Reason("no success" if is_wanted else "a success")

    def judge(facts: RowFacts) -> Reason | None:
        success = facts.success
        if success is None and (success := success_of(facts)) is None:
            return unknown
        return None if success == is_wanted else opposite

    return judge


def _turns_rule(min_turns: int | None, max_turns: int | None) -> _FactRule:
    least, most = min_turns or 0, sys.maxsize if max_turns is None else max_turns
    too_few, too_many = Reason(f"under {min_turns} turns"), Reason(f"over {max_turns} turns")

    def judge(facts: RowFacts) -> Reason | None:
        if facts.num_turns < least:
            return too_few
        return None if facts.num_turns <= most else too_many

    return judge


def _uses(facts: RowFacts, tool: str) -> bool:
    return bool(facts.tools_used) if tool == ANY_TOOL else tool in facts.tools_used


def _tool_error_rule(max_errors: int) -> _FactRule:
    unknown, over = Reason("tool errors unknown"), Reason(f"over {max_errors} tool errors")

    def judge(facts: RowFacts) -> Reason | None:
        num_errors = facts.tool_errors
        if num_errors is None:
            # Without a tool's reply no tool can have failed; with one, the errors were not counted.
            is_unknown = any(message.role == "tool" for message in facts.messages)
            return unknown if is_unknown else None
        return None if num_errors <= max_errors else over

    return judge


def _row_rules(request: FilterDataset, known: Knowledge) -> list[_RowRule]:
    """Returns those filters of a request that need the messages, or knowledge beyond the row."""
    rules: list[_RowRule] = []
    if request.verdicts is not None:
        rules.append(_verdict_rule(known.verdicts, reviewed_only=request.reviewed_only))
    if request.answered_by:
        rules.append(_answerer_rule(request.answered_by))
    if request.min_success_rate is not None:
        rules.append(_success_rate_rule(request.min_success_rate, known.success_rates))
    if request.max_tokens is not None and known.renderer is not None:
        rules.append(_token_rule(request.max_tokens, known.renderer))
    for pattern, is_wanted in ((request.contains, True), (request.not_contains, False)):
        if pattern is not None:
            rules.append(_regex_rule(pattern, request.match, is_wanted=is_wanted))
    if request.language is not None:
        rules.append(_language_rule(request.language))
    sensitive = (
        (request.drop_secrets, "secret", SECRETS),
        (request.drop_pii, "personal data", PERSONAL_DATA),
    )
    rules += [_sensitive_data_rule(name, kinds) for is_asked, name, kinds in sensitive if is_asked]
    if known.evaluation is not None:
        rules.append(_contamination_rule(known.evaluation, request.decontaminate_level))
    return rules


def _verdict_rule(verdicts: RowVerdicts, *, reviewed_only: bool) -> _RowRule:
    dropped = Reason("dropped in review")
    unseen = Reason("not reviewed") if reviewed_only else None

    def judge(row: CuratedRow) -> Reason | None:
        verdict = verdicts.of(row)
        return dropped if verdict == "drop" else unseen if verdict is None else None

    return judge


def _answerer_rule(wanted: Sequence[str]) -> _RowRule:
    unknown, other = Reason("who answered is unknown"), Reason("answered by another model")

    def judge(row: CuratedRow) -> Reason | None:
        models = answerers_of(row)
        if not models:
            return unknown
        return None if are_all_named(models, wanted) else other

    return judge


def _success_rate_rule(min_rate: float, rates: Mapping[str, float]) -> _RowRule:
    unknown = Reason("success rate of its task unknown")
    low = Reason(f"success rate of its task below {min_rate:g}")

    def judge(row: CuratedRow) -> Reason | None:
        rate = rates.get(row.task)
        if rate is None:
            return unknown
        return None if rate >= min_rate else low

    return judge


def _token_rule(max_tokens: int, renderer: ChatRenderer) -> _RowRule:
    over, unfit = Reason(f"over {max_tokens} tokens"), Reason("not renderable for the student")

    def judge(row: CuratedRow) -> Reason | None:
        num_tokens = count_tokens(row, renderer)
        if num_tokens is None:
            return unfit
        return None if num_tokens <= max_tokens else over

    return judge


def count_tokens(row: CuratedRow, renderer: ChatRenderer) -> int | None:
    """Returns the number of tokens of a row as training renders it.

    None if the student's template cannot render it. The number is kept in `row.num_tokens`.
    """
    if row.num_tokens is None:
        try:
            messages, tools = cast("list[Message]", row.messages), cast("list[Any]", row.tools)
            rendered = renderer.conversation(messages, tools)
        except (ModelError, DataError, msgspec.DecodeError, RecursionError):
            return None
        row.num_tokens = len(rendered.ids)
    return row.num_tokens


def _regex_rule(pattern: str, match: str, *, is_wanted: bool) -> _RowRule:
    regex = re.compile(pattern)
    reason = Reason("contains: no match" if is_wanted else "not_contains: a match")

    def judge(row: CuratedRow) -> Reason | None:
        texts = (
            [final_answer(row.messages)]
            if match == "answer"
            else [content_text(message.get("content")) for message in row.messages]
        )
        return None if any(map(regex.search, texts)) == is_wanted else reason

    return judge


def _language_rule(wanted: str) -> _RowRule:
    detector = LanguageDetector(wanted)

    def judge(row: CuratedRow) -> Reason | None:
        language = detector.language_of(final_answer(row.messages))
        return None if language == wanted else Reason(f"language: {language or 'unknown'}")

    return judge


def _sensitive_data_rule(name: str, kinds: tuple[SensitiveKind, ...]) -> _RowRule:
    def judge(row: CuratedRow) -> Reason | None:
        names = kinds_in("\n".join(strings_in(row.whole)), kinds)
        return Reason(f"{name}: {', '.join(names)}") if names else None

    return judge


def _contamination_rule(index: ContaminationIndex, level: ContaminationLevel) -> _RowRule:
    dropped = LEVELS[: LEVELS.index(level) + 1]

    def judge(row: CuratedRow) -> Reason | None:
        match = index.find(*_texts_with_prompts(row), near="near" in dropped)
        if match is None or match.level not in dropped:
            return None
        return Reason(CONTAMINATED[match.level], match.where)

    return judge


def user_text(row: CuratedRow) -> str:
    """Returns the texts of all messages of the user in a row, one per line."""
    return "\n".join(user_texts(row.messages))


def _texts_with_prompts(row: CuratedRow) -> tuple[list[str], list[str]]:
    """Returns the texts of a row in which an evaluation prompt is looked for: user's and others'.

    These are all of the user's messages as one text, and each message of user and assistant. System
    prompts are left out because many rows share them, and tool results because neither user nor
    assistant wrote them.
    """
    texts = [user_text(row), *user_texts(row.messages)]
    answers = [content_text(m.get("content")) for m in row.messages if m.get("role") == "assistant"]
    return list(dict.fromkeys(filter(None, texts))), list(dict.fromkeys(filter(None, answers)))


class _Model(msgspec.Struct, frozen=True, gc=False):
    model: str | None = None


class _Answerers(msgspec.Struct, frozen=True, gc=False):
    answered_by: list[_Model] | None = None
    teacher: _Model | None = None


_ANSWERERS = msgspec.json.Decoder(_Answerers)


def answerers_of(row: CuratedRow) -> set[str]:
    """Returns the models that answered a row; none if it does not say so.

    Those that the endpoint named take precedence over the one that was requested.
    """
    try:
        found = _ANSWERERS.decode(row.line.view)
    except msgspec.DecodeError:
        return set()  # of another layout, where these names mean something else
    named = found.answered_by or ([found.teacher] if found.teacher is not None else [])
    return {each.model for each in named if each.model}


def are_all_named(models: set[str], patterns: Sequence[str]) -> bool:
    """Returns whether each model has one of the names, in which `*` stands for any letters."""
    return all(any(fnmatchcase(model, pattern) for pattern in patterns) for model in models)
