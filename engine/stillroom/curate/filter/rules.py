"""The filters that judge each row by itself.

`_fact_rules` and `_row_rules` list the filters of a request, and `RowJudge` applies them to a row.
To add a filter, add a function to one of the lists, and its option to request.py.
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
from stillroom.errors import DataError, ModelError, noun_for
from stillroom.secrecy.patterns import PERSONAL_DATA, SECRETS, SensitiveKind, kinds_in
from stillroom.types import Message


@dataclass(frozen=True, slots=True)
class Reason:
    """The reason why a row is dropped."""

    text: str
    """The reason in words. Dropped rows are counted by it, so it must have few different values."""
    like: str | None = None
    """The `file:line` of the row or evaluation prompt that the row repeats, if it repeats one."""


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
class FilterContext:
    """The data that some filters need in addition to the row."""

    renderer: ChatRenderer | None = None
    """The chat renderer of the student, to count tokens; None if the request names no model."""
    success_rates: Mapping[str, float] = field(default_factory=dict[str, float])
    """The share of successful rollouts by task; tasks whose share is unknown are missing."""
    evaluation: ContaminationIndex | None = None
    """The index of the evaluation prompts; None if the request names no evaluation file."""
    verdicts: RowVerdicts = field(default_factory=RowVerdicts)
    """The verdicts of the review; empty if the request names no file with verdicts."""


_FactRule = Callable[[RowFacts], Reason | None]
_RowRule = Callable[[CuratedRow], Reason | None]


class RowJudge:
    """Applies the filters of a request that judge each row by itself."""

    def __init__(self, request: FilterDataset, context: FilterContext) -> None:
        self._fact_rules = _fact_rules(request)
        self._row_rules = _row_rules(request, context)

    def reasons(self, row: CuratedRow) -> Reasons:
        """Returns the reasons to drop a row; an empty tuple if the row passes."""
        facts = row.facts
        if facts is None:
            return (_NOT_A_ROW,)
        reasons: list[Reason] = []
        # For every row; a comprehension would cost as much again as these rules themselves.
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
    """Returns the filters of a request that need only the facts of a row."""
    rules: list[_FactRule] = []
    if request.min_reward is not None:
        rules.append(_reward_rule(request.min_reward))
    if request.success is not None:
        rules.append(_success_rule(want_success=request.success))
    if request.min_turns is not None or request.max_turns is not None:
        rules.append(_turns_rule(request.min_turns, request.max_turns))
    if request.require_final_answer:
        no_answer = Reason("no final answer")
        rules.append(lambda facts: None if facts.has_final_answer else no_answer)
    if (tool := request.require_tool_use) is not None:
        unused = Reason(f"tool use missing ({tool})")
        rules.append(lambda facts: None if _uses_tool(facts, tool) else unused)
    if request.only_tools:
        allowed, others = frozenset(request.only_tools), Reason("calls other tools")
        rules.append(lambda facts: None if facts.tools_used <= allowed else others)
    if request.max_tool_errors is not None:
        rules.append(_tool_error_rule(request.max_tool_errors))
    return rules


def _reward_rule(min_reward: float) -> _FactRule:
    """Returns a rule that drops rows with a lower reward, or without one."""
    absent, low = Reason("no reward"), Reason(f"reward below {min_reward:g}")

    def judge(facts: RowFacts) -> Reason | None:
        if facts.reward is None:
            return absent
        return None if facts.reward >= min_reward else low

    return judge


def _success_rule(*, want_success: bool) -> _FactRule:
    """Returns a rule that drops rows whose success is unknown or not the wanted one."""
    unknown, success = Reason("success unknown"), Reason("a success")

    def judge(facts: RowFacts) -> Reason | None:
        if facts.success is None and success_of(facts) is None:
            return unknown
        failure = facts.failure
        if (failure is None) == want_success:
            return None
        return success if failure is None else Reason(failure)

    return judge


def _turns_rule(min_turns: int | None, max_turns: int | None) -> _FactRule:
    """Returns a rule that drops rows with too few or too many assistant messages."""
    low, high = min_turns or 0, sys.maxsize if max_turns is None else max_turns
    too_few = Reason(f"under {low} {noun_for(low, 'turn')}")
    too_many = Reason(f"over {high} {noun_for(high, 'turn')}")

    def judge(facts: RowFacts) -> Reason | None:
        if facts.num_turns < low:
            return too_few
        return None if facts.num_turns <= high else too_many

    return judge


def _uses_tool(facts: RowFacts, tool: str) -> bool:
    return bool(facts.tools_used) if tool == ANY_TOOL else tool in facts.tools_used


def _tool_error_rule(max_errors: int) -> _FactRule:
    """Returns a rule that drops rows with more tool errors, or an unknown number of them."""
    # Only rollouts of Stillroom record them; in others, an error looks like any other tool reply.
    unknown = Reason("tool errors not recorded: use not_contains with match=conversation")
    over = Reason(f"over {max_errors} tool errors")

    def judge(facts: RowFacts) -> Reason | None:
        num_errors = facts.tool_errors
        if num_errors is None:
            # Without tool replies, no tool can have failed.
            has_replies = any(message.role == "tool" for message in facts.messages)
            return unknown if has_replies else None
        return None if num_errors <= max_errors else over

    return judge


def _row_rules(request: FilterDataset, context: FilterContext) -> list[_RowRule]:
    """Returns the filters of a request that need the messages of a row, or the context."""
    rules: list[_RowRule] = []
    if request.verdicts is not None:
        rules.append(_verdict_rule(context.verdicts, reviewed_only=request.reviewed_only))
    if request.answered_by:
        rules.append(_answerer_rule(request.answered_by))
    if request.min_success_rate is not None:
        rules.append(_success_rate_rule(request.min_success_rate, context.success_rates))
    if request.max_tokens is not None and context.renderer is not None:
        rules.append(_token_rule(request.max_tokens, context.renderer))
    for pattern, must_match in ((request.contains, True), (request.not_contains, False)):
        if pattern is not None:
            rules.append(_regex_rule(pattern, request.match, must_match=must_match))
    if request.language is not None:
        rules.append(_language_rule(request.language))
    sensitive = (
        (request.drop_secrets, "secret", SECRETS),
        (request.drop_pii, "personal data", PERSONAL_DATA),
    )
    rules += [
        _sensitive_data_rule(name, kinds) for is_enabled, name, kinds in sensitive if is_enabled
    ]
    if context.evaluation is not None:
        rules.append(_contamination_rule(context.evaluation, request.decontaminate_level))
    return rules


def _verdict_rule(verdicts: RowVerdicts, *, reviewed_only: bool) -> _RowRule:
    """Returns a rule that drops rows with the verdict drop; also, if wanted, unreviewed rows."""
    dropped = Reason("dropped in review")
    unreviewed = Reason("not reviewed") if reviewed_only else None

    def judge(row: CuratedRow) -> Reason | None:
        verdict = verdicts.verdict_on(row)
        return dropped if verdict == "drop" else unreviewed if verdict is None else None

    return judge


def _answerer_rule(allowed: Sequence[str]) -> _RowRule:
    """Returns a rule that drops rows whose answering model is unknown or matches no pattern."""
    unknown, other = Reason("answering model unknown"), Reason("answered by another model")

    def judge(row: CuratedRow) -> Reason | None:
        models = answerers_of(row)
        if not models:
            return unknown
        return None if _all_match(models, allowed) else other

    return judge


def _success_rate_rule(min_rate: float, rates: Mapping[str, float]) -> _RowRule:
    """Returns a rule that drops rows of tasks with a lower success rate, or an unknown one."""
    unknown = Reason("task success rate unknown")
    low = Reason(f"task success rate below {min_rate:g}")

    def judge(row: CuratedRow) -> Reason | None:
        rate = rates.get(row.task_id)
        if rate is None:
            return unknown
        return None if rate >= min_rate else low

    return judge


def _token_rule(max_tokens: int, renderer: ChatRenderer) -> _RowRule:
    """Returns a rule that drops rows with more tokens, and those that cannot be rendered."""
    over = Reason(f"over {max_tokens} tokens")
    not_renderable = Reason("not renderable for the student")

    def judge(row: CuratedRow) -> Reason | None:
        num_tokens = count_tokens(row, renderer)
        if num_tokens is None:
            return not_renderable
        return None if num_tokens <= max_tokens else over

    return judge


def count_tokens(row: CuratedRow, renderer: ChatRenderer) -> int | None:
    """Returns the number of tokens of a row as training renders it, and sets `row.num_tokens`.

    Returns None if the student's chat template cannot render the row.
    """
    if row.num_tokens is None:
        try:
            messages, tools = cast("list[Message]", row.messages), cast("list[Any]", row.tools)
            rendered = renderer.conversation(messages, tools)
        except (ModelError, DataError, msgspec.DecodeError, RecursionError):
            return None
        row.num_tokens = len(rendered.ids)
    return row.num_tokens


def _regex_rule(pattern: str, match: str, *, must_match: bool) -> _RowRule:
    """Returns a rule that drops rows without a match or, unless `must_match`, with a match."""
    regex = re.compile(pattern)
    reason = Reason("contains: no match" if must_match else "not_contains: a match")

    def judge(row: CuratedRow) -> Reason | None:
        texts = (
            [final_answer(row.messages)]
            if match == "answer"
            else [content_text(message.get("content")) for message in row.messages]
        )
        return None if any(map(regex.search, texts)) == must_match else reason

    return judge


def _language_rule(allowed: str) -> _RowRule:
    """Returns a rule that drops rows whose answer is in another language."""
    detector = LanguageDetector(allowed)

    def judge(row: CuratedRow) -> Reason | None:
        language = detector.language_of(final_answer(row.messages))
        return None if language == allowed else Reason(f"language: {language or 'unknown'}")

    return judge


def _sensitive_data_rule(name: str, kinds: tuple[SensitiveKind, ...]) -> _RowRule:
    """Returns a rule that drops rows with sensitive data of these kinds, anywhere in the row."""

    def judge(row: CuratedRow) -> Reason | None:
        names = kinds_in("\n".join(strings_in(row.fields)), kinds)
        return Reason(f"{name}: {', '.join(names)}") if names else None

    return judge


def _contamination_rule(index: ContaminationIndex, level: ContaminationLevel) -> _RowRule:
    """Returns a rule that drops rows with an evaluation prompt at this level or a closer one."""
    levels = LEVELS[: LEVELS.index(level) + 1]

    def judge(row: CuratedRow) -> Reason | None:
        match = index.find_in(row.messages, near="near" in levels)
        if match is None or match.level not in levels:
            return None
        return Reason(CONTAMINATED[match.level], match.where)

    return judge


def user_text(row: CuratedRow) -> str:
    """Returns the texts of all user messages in a row, joined by newlines."""
    return "\n".join(user_texts(row.messages))


class _Model(msgspec.Struct, frozen=True, gc=False):
    model: str | None = None


class _Answerers(msgspec.Struct, frozen=True, gc=False):
    answered_by: list[_Model] | None = None
    teacher: _Model | None = None


_ANSWERERS = msgspec.json.Decoder(_Answerers)


def answerers_of(row: CuratedRow) -> set[str]:
    """Returns the models that answered a row; none if the row does not record them.

    The models that the endpoint named take precedence over the one that was requested.
    """
    try:
        fields = _ANSWERERS.decode(row.line.view)
    except msgspec.DecodeError:
        return set()  # In another layout, fields of these names have another meaning.
    answerers = fields.answered_by or ([fields.teacher] if fields.teacher is not None else [])
    return {answerer.model for answerer in answerers if answerer.model}


def _all_match(models: set[str], patterns: Sequence[str]) -> bool:
    """Returns whether each model matches one of the patterns, in which `*` matches any text."""
    return all(any(fnmatchcase(model, pattern) for pattern in patterns) for model in models)
