"""Any conversation that is cut into calls comes back as it was, and each call has one location."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.call_logs import call_logs, expected_conversations, plain_messages
from stillroom.data.checks import message_problems
from stillroom.importing.conversations.collector import RowCollector
from stillroom.importing.conversations.rollouts import RolloutBuilder, join_rows
from stillroom.importing.redaction import Redaction
from stillroom.importing.spill import Spill
from stillroom.importing.tally import ImportTally
from stillroom.secrecy.redaction import NO_SECRETS


def no_refusals(row):
    raise AssertionError(row)


def rollouts_of(log, folder, *, min_cached):
    """Returns the rollouts that a log makes."""
    redaction = Redaction(NO_SECRETS, keep_secrets=True, keep_personal=True)
    with Spill(folder) as spill:
        tally = ImportTally(no_refusals, str, str)
        collected = RowCollector(spill, redaction, tally, min_cached=min_cached)
        for row in log.rows:
            collected.add(row, "calls")
        joined = join_rows(collected.rows, collected.tree)
        builder = RolloutBuilder(collected, joined, redaction)
        return [builder.build(row) for row in joined.kept], joined


def check(log, folder, **options):
    rollouts, joined = rollouts_of(log, folder, **options)
    messages = [json.loads(rollout.messages_json) for rollout in rollouts]
    found = [(r.kept.group, plain_messages(m)) for r, m in zip(rollouts, messages, strict=True)]
    assert sorted(map(repr, found)) == sorted(map(repr, expected_conversations(log)))

    locations = [row.source for rollout in rollouts for row in rollout.rows]
    assert sorted(locations) == sorted(str(row.location) for row in log.rows)

    trained = [
        m for each in messages for m in each if m["role"] == "assistant" and "weight" not in m
    ]
    assert len(trained) == len(set(log.plain)) == sum(rollout.num_turns for rollout in rollouts)

    for each in messages:
        assert next(message_problems(each), None) is None
    with_reasoning = {
        plain for row, plain in zip(log.rows, log.plain, strict=True)
        if "reasoning_content" in row.messages[-1]
    }  # fmt: skip
    for (group, plain), each in zip(found, messages, strict=True):
        for index, message in enumerate(each):
            if (group, plain[: index + 1]) in with_reasoning:
                assert message["reasoning_content"] == "because"
    for row, main in joined.branch_of.items():
        assert main != row
        assert main in joined.kept


@given(call_logs(), st.sampled_from([1, 3, 1000]))
@settings(max_examples=25)
def test_any_log_of_calls_gives_back_its_conversations(tmp_path_factory, log, min_cached):
    check(log, tmp_path_factory.getbasetemp(), min_cached=min_cached)


@pytest.mark.thorough
@given(call_logs(max_turns=12), st.sampled_from([1, 3, 1000]))
@settings(max_examples=60)
def test_very_many_logs_of_calls_give_back_their_conversations(tmp_path_factory, log, min_cached):
    check(log, tmp_path_factory.getbasetemp(), min_cached=min_cached)
