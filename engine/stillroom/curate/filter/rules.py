"""The filters that judge each row by itself: what was asked for becomes reasons to drop."""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from stillroom.curate.filter.contamination import ContaminationIndex
from stillroom.curate.filter.language import LanguageDetector
from stillroom.curate.filter.request import ANY_TOOL, FilterDataset
from stillroom.curate.filter.rows import Row
from stillroom.curate.filter.secrets import PERSONAL_DATA, SECRETS, Kind, kinds_in
from stillroom.curate.filter.verdicts import Verdict
from stillroom.curate.rows.facts import RolloutFacts
from stillroom.curate.rows.supervised import SUPERVISED
from stillroom.curate.rows.words import content_text, final_answer, strings_in, user_texts
from stillroom.data.chat.render import ChatRenderer
from stillroom.errors import DataError, ModelError
from stillroom.types import Message


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a row is dropped."""

    text: str
    """Of few different ones: rows are counted by it."""
    like: str | None = None
    """`file:line` of what the row repeats."""


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What some filters know beyond the row they judge."""

    renderer: ChatRenderer | None = None
    """Of the student."""
    success_rates: Mapping[str, float] = field(default_factory=dict[str, float])
    """Of the tasks where one is known."""
    evaluation: ContaminationIndex | None = None
    verdicts: Mapping[str, Verdict] = field(default_factory=dict[str, Verdict])


FactRule = Callable[[RolloutFacts], Reason | None]
Rule = Callable[[Row], Reason | None]


def success_of(row: RolloutFacts) -> bool | None:
    """Whether a row is a success; None of a supervised row that does not say it in any way."""
    is_told = row.success is not None or row.reward is not None
    return row.is_success if is_told or row.stop_reason != SUPERVISED else None


def fact_rules(request: FilterDataset) -> list[FactRule]:
    """Returns the filters that were asked for and need the row's facts alone."""
    rules: list[FactRule] = []
    if (least := request.min_reward) is not None:
        rules.append(_reward_rule(least))
    if (wanted := request.success) is not None:
        rules.append(_success_rule(wanted))
    if request.min_turns is not None or request.max_turns is not None:
        rules.append(_turns_rule(request.min_turns, request.max_turns))
    if request.require_final_answer:
        open_end = Reason("no final answer")
        rules.append(lambda row: None if row.has_final_answer else open_end)
    if (tool := request.require_tool_use) is not None:
        unused = Reason(f"tool use missing ({tool})")
        rules.append(lambda row: None if _uses(row, tool) else unused)
    if (errors := request.max_tool_errors) is not None:
        rules.append(_tool_error_rule(errors))
    return rules


def _reward_rule(least: float) -> FactRule:
    absent, low = Reason("no reward"), Reason(f"reward below {least:g}")

    def judge(row: RolloutFacts) -> Reason | None:
        if row.reward is None:
            return absent
        return None if row.reward >= least else low

    return judge


def _success_rule(wanted: bool) -> FactRule:
    unknown, other = Reason("success unknown"), Reason("no success" if wanted else "a success")

    def judge(row: RolloutFacts) -> Reason | None:
        success = row.success
        if success is None and (success := success_of(row)) is None:
            return unknown
        return None if success == wanted else other

    return judge


def _turns_rule(fewest: int | None, most: int | None) -> FactRule:
    least, limit = fewest or 0, sys.maxsize if most is None else most
    too_few, too_many = Reason(f"under {fewest} turns"), Reason(f"over {most} turns")

    def judge(row: RolloutFacts) -> Reason | None:
        count = row.num_turns
        if count < least:
            return too_few
        return None if count <= limit else too_many

    return judge


def _uses(row: RolloutFacts, tool: str) -> bool:
    return bool(row.tools_used) if tool == ANY_TOOL else tool in row.tools_used


def _tool_error_rule(most: int) -> FactRule:
    unknown, over = Reason("tool errors unknown"), Reason(f"over {most} tool errors")

    def judge(row: RolloutFacts) -> Reason | None:
        errors = row.tool_errors
        if errors is None:
            # Where no tool replied there were none; else nobody has counted them.
            is_unknown = any(message.role == "tool" for message in row.messages)
            return unknown if is_unknown else None
        return None if errors <= most else over

    return judge


def row_rules(request: FilterDataset, known: Knowledge) -> list[Rule]:
    """Returns the filters that were asked for and need the messages, or more than the row."""
    rules: list[Rule] = []
    if request.verdicts is not None:
        rules.append(_verdict_rule(known.verdicts, reviewed_only=request.reviewed_only))
    if (rate := request.min_success_rate) is not None:
        rules.append(_rate_rule(rate, known.success_rates))
    if request.max_tokens is not None and known.renderer is not None:
        rules.append(_token_rule(request.max_tokens, known.renderer))
    for pattern, is_wanted in ((request.contains, True), (request.not_contains, False)):
        if pattern is not None:
            rules.append(_regex_rule(pattern, request.match, is_wanted=is_wanted))
    if request.language is not None:
        rules.append(_language_rule(request.language))
    if request.drop_secrets:
        rules.append(_scan_rule("secret", SECRETS))
    if request.drop_pii:
        rules.append(_scan_rule("personal data", PERSONAL_DATA))
    if known.evaluation is not None:
        rules.append(_contamination_rule(known.evaluation))
    return rules


def _verdict_rule(verdicts: Mapping[str, Verdict], *, reviewed_only: bool) -> Rule:
    dropped = Reason("dropped in review")
    unseen = Reason("not reviewed") if reviewed_only else None

    def judge(row: Row) -> Reason | None:
        verdict = verdicts.get(row.review_id or "")
        return dropped if verdict == "drop" else unseen if verdict is None else None

    return judge


def _rate_rule(least: float, rates: Mapping[str, float]) -> Rule:
    unknown = Reason("success rate of its task unknown")
    low = Reason(f"success rate of its task below {least:g}")

    def judge(row: Row) -> Reason | None:
        rate = rates.get(row.task)
        if rate is None:
            return unknown
        return None if rate >= least else low

    return judge


def _token_rule(most: int, renderer: ChatRenderer) -> Rule:
    over, unfit = Reason(f"over {most} tokens"), Reason("not renderable for the student")

    def judge(row: Row) -> Reason | None:
        count = num_tokens(row, renderer)
        if count is None:
            return unfit
        return None if count <= most else over

    return judge


def num_tokens(row: Row, renderer: ChatRenderer) -> int | None:
    """Returns how many tokens training sees of a row; None if the template cannot render it."""
    if row.num_tokens is None:
        try:
            messages, tools = cast("list[Message]", row.messages), cast("list[Any]", row.tools)
            rendered = renderer.conversation(messages, tools)
        except (ModelError, DataError, msgspec.DecodeError, RecursionError):
            return None
        row.num_tokens = len(rendered.ids)
    return row.num_tokens


def _regex_rule(pattern: str, where: str, *, is_wanted: bool) -> Rule:
    regex = re.compile(pattern)
    reason = Reason("contains: no match" if is_wanted else "not_contains: a match")

    def judge(row: Row) -> Reason | None:
        texts = (
            [final_answer(row.messages)]
            if where == "answer"
            else [content_text(message.get("content")) for message in row.messages]
        )
        return None if any(map(regex.search, texts)) == is_wanted else reason

    return judge


def _language_rule(wanted: str) -> Rule:
    detector = LanguageDetector(wanted)

    def judge(row: Row) -> Reason | None:
        found = detector.language_of(final_answer(row.messages))
        return None if found == wanted else Reason(f"language: {found or 'cannot be told'}")

    return judge


def _scan_rule(name: str, kinds: tuple[Kind, ...]) -> Rule:
    def judge(row: Row) -> Reason | None:
        text = "\n".join(strings_in(row.whole))
        found = kinds_in(text, kinds)
        return Reason(f"{name}: {', '.join(found)}") if found else None

    return judge


def _contamination_rule(index: ContaminationIndex) -> Rule:
    def judge(row: Row) -> Reason | None:
        found = index.find(prompt_texts(row))
        if found is None:
            return None
        text = "evaluation prompt" if found.is_exact else "evaluation prompt, slightly changed"
        return Reason(text, found.where)

    return judge


def asked_text(row: Row) -> str:
    """Returns all that the user says in a row."""
    return "\n".join(user_texts(row.messages))


def prompt_texts(row: Row) -> list[str]:
    """Returns where an evaluation prompt may stand: what user and assistant say, and together.

    System prompts are shared by many rows, and tool results are nobody's words.
    """
    spoken = [m for m in row.messages if m.get("role") in ("user", "assistant")]
    texts = [asked_text(row), *(content_text(m.get("content")) for m in spoken)]
    return list(dict.fromkeys(filter(None, texts)))
