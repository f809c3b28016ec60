"""Sessions of Claude Code: one written by the program itself, and others with its odd lines."""

import pytest

from fakes.trace_files import (
    SAMPLES,
    compared,
    conversations,
    read,
    recognised_by,
    refusals,
    seen_calls,
    shown,
    write_lines,
)
from stillroom.types import Usage

_FOLDER = SAMPLES / "claude_code"
_CONTEXT = "the session file lacks the agent's system prompt and reminders"


def line(uuid, parent, content, *, reply=None, **more):
    """A message's line; `reply` is the id of the reply that it is a part of."""
    role = "user" if reply is None else "assistant"
    message = {"role": role, "content": content}
    if reply is not None:
        usage = {"input_tokens": 10, "output_tokens": 2}
        message |= {"id": reply, "model": "claude-x", "stop_reason": "end_turn", "usage": usage}
    return {
        "uuid": uuid,
        "parentUuid": parent,
        "sessionId": "s",
        "type": role,
        "isSidechain": False,
        "message": message,
        "timestamp": "2026-03-01T10:00:00Z",
    } | more


def text(words):
    return [{"type": "text", "text": words}]


def session(tmp_path, *rows):
    return read("claude_code", write_lines(tmp_path / "session.jsonl", *rows))


def test_a_session_that_claude_code_wrote_holds_what_the_endpoint_saw():
    calls = seen_calls("claude_code", "session.seen.json")
    main, later = conversations(read("claude_code", _FOLDER / "session.jsonl"))
    (agent,) = conversations(read("claude_code", _FOLDER / "agent-chair.jsonl"))
    last_of_main, last_of_agent, last = calls[3], calls[2], calls[-1]
    assert compared(main.messages) == compared(last_of_main["messages"])
    assert compared(agent.messages) == compared(last_of_agent["messages"])
    assert compared(later.messages) == compared(last["messages"])
    assert {main.model, agent.model, later.model} == {call["model"] for call in calls}
    assert main.usage == Usage(
        prompt_tokens=sum(calls[number]["prompt_tokens"] for number in (0, 1, 3)),
        completion_tokens=sum(calls[number]["completion_tokens"] for number in (0, 1, 3)),
    )
    assert (later.usage, later.parent) == (Usage(prompt_tokens=90, completion_tokens=4), main.id)
    assert (agent.parent, agent.group) == (main.id, main.group)


def test_a_question_that_was_asked_again_is_a_branch_and_tokens_count_once(tmp_path):
    first, second = conversations(
        session(
            tmp_path,
            line("a", None, "Hi"),
            line("b", "a", text("Hello."), reply="m1"),
            line("c", "b", "Price?"),
            line("d", "c", text("12."), reply="m2"),
            line("e", "b", "Price in euros?"),
            line("f", "e", text("12 euros."), reply="m3"),
        )
    )
    assert shown(first.messages)[2:] == ["user Price?", "assistant 12."]
    assert shown(second.messages) == [
        "user Hi",
        "assistant Hello.",
        "user Price in euros?",
        "assistant 12 euros.",
    ]
    assert (first.id, second.id, second.parent) == ("s", "s/f", "s")
    assert [m.get("weight") for m in second.messages] == [None, 0, None, None]
    assert (first.usage.completion_tokens, second.usage.completion_tokens) == (4, 2)


def test_a_branch_without_a_reply_is_refused_and_named(tmp_path):
    rows = session(
        tmp_path,
        line("a", None, "Hi"),
        line("b", "a", text("Hello."), reply="m1"),
        line("c", "b", "Never mind"),
        line("d", "b", "Price?"),
        line("e", "d", text("12."), reply="m2"),
    )
    assert refusals(rows) == [(3, "no reply from the model")]
    assert len(rows) == 2


def test_a_sub_agent_in_the_same_file_is_a_conversation_of_its_own(tmp_path):
    call = {"type": "tool_use", "id": "t", "name": "Task", "input": {"prompt": "Look"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "Seen."}
    main, side = conversations(
        session(
            tmp_path,
            line("a", None, "Hi"),
            line("b", "a", [call], reply="m1"),
            line("x", None, "Look", isSidechain=True),
            line("c", "b", [result]),
            line("y", "x", text("Seen."), reply="m2", isSidechain=True),
            line("d", "c", text("Done."), reply="m3"),
        )
    )[::-1]
    assert (main.id, side.id, side.parent) == ("s", "s/y", "s")
    assert shown(side.messages) == ["user Look", "assistant Seen."]
    assert shown(main.messages)[1:] == [
        'assistant  Task{"prompt": "Look"}',
        "tool Seen.",
        "assistant Done.",
    ]


def test_a_failed_call_is_the_conversations_error_and_no_message(tmp_path):
    failed = line("b", "a", text("API Error: 529"), reply="x", isApiErrorMessage=True)
    failed["message"]["model"] = "<synthetic>"
    retried, given_up = (
        session(
            tmp_path,
            line("a", None, "Hi"),
            failed,
            line("c", "b", "Again?"),
            line("d", "c", text("Hello."), reply="m1"),
            *more,
        )
        for more in ([], [line("e", "d", "More"), failed | {"uuid": "f", "parentUuid": "e"}])
    )
    assert shown(conversations(retried)[0].messages) == ["user Hi\nAgain?", "assistant Hello."]
    assert conversations(retried)[0].error is None
    assert conversations(given_up)[0].error == "API Error: 529"


def test_prompts_that_waited_in_a_queue_are_the_users(tmp_path):
    queued = {"type": "queued_command", "prompt": "And a chair?"}
    note = {"uuid": "c", "parentUuid": "b", "type": "attachment", "sessionId": "s"}
    (row,) = conversations(
        session(
            tmp_path,
            line("a", None, "A lamp?"),
            line("b", "a", text("Wait."), reply="m1"),
            note | {"attachment": queued},
            line("d", "c", text("30."), reply="m2"),
        )
    )
    assert shown(row.messages)[2] == "user And a chair?"


def test_hidden_thoughts_and_a_missing_beginning_are_named(tmp_path):
    hidden = [{"type": "redacted_thinking", "data": "x"}, *text("Hello.")]
    (row,) = conversations(
        session(tmp_path, line("b", "gone", "Hi"), line("c", "b", hidden, reply="m1"))
    )
    assert row.dropped == (
        _CONTEXT,
        "earlier messages are not in the file",
        "reasoning is encrypted or redacted",
    )


def test_hostile_links_and_broken_lines_do_not_stop_the_reader(tmp_path):
    rows = session(
        tmp_path,
        line("a", "b", "Hi"),
        line("b", "a", text("Hello."), reply="m1"),
        line("a", "a", "The same again"),
        b"{not JSON",
        b'{"uuid": "x", "parentUuid": "b", "type": "user", "message": 5}',
        line("c", "b", [{"type": "tool_result"}, 7, {"type": "tool_use", "id": "t"}]),
        line("d", "c", [{"type": "tool_use", "id": "t"}], reply="m2"),
        {"uuid": 5, "type": "assistant"},
    )
    assert [reason for _, reason in refusals(rows)] == [
        "not a JSON object",
        "a message has no role",
        "a tool call has no name",
        "a tool call has no name",
    ]


@pytest.mark.parametrize(
    "first",
    [
        {"type": "summary", "summary": "Prices", "leafUuid": "x"},
        {"type": "file-history-snapshot", "messageId": "m", "snapshot": {}},
        line("a", None, "x" * 100_000),
    ],
)
def test_a_session_is_recognised_whatever_its_first_line(first, tmp_path):
    path = write_lines(tmp_path / "s.jsonl", first)
    assert recognised_by(path) == ["claude_code"]


def test_printed_sessions_with_the_users_messages_are_read_by_thread(tmp_path):
    def printed(uuid, role, content, **more):
        message = {"role": role, "content": content, "id": f"m{uuid}", "model": "claude-x"}
        return {
            "type": role,
            "uuid": uuid,
            "session_id": "s",
            "parent_tool_use_id": None,
            "message": message,
        } | more

    path = write_lines(
        tmp_path / "printed.jsonl",
        {"type": "system", "subtype": "init", "session_id": "s", "uuid": "0"},
        printed("1", "user", "Hi"),
        printed("2", "user", "Look", parent_tool_use_id="t"),
        printed("3", "assistant", text("Hello.")),
        printed("4", "assistant", text("Seen."), parent_tool_use_id="t"),
        printed("5", "user", "Hi again", session_id="other"),
        printed("6", "assistant", text("Hello again."), session_id="other"),
        {"type": "result", "session_id": "s", "result": "Hello."},
    )
    main, agent, other = conversations(read("claude_code_output", path))
    assert shown(main.messages) == ["user Hi", "assistant Hello."]
    assert (shown(agent.messages)[0], agent.parent) == ("user Look", main.id)
    assert (other.id, other.group) == ("other", "other")


@pytest.mark.parametrize("is_fork_first", [True, False])
def test_what_a_forked_session_copies_is_trained_once(is_fork_first, tmp_path):
    def talk(session):
        return [
            line("a", None, "Hi", sessionId=session),
            line("b", "a", text("Hello."), reply="m1", sessionId=session),
        ]

    asked = line("c", "b", "Price?", sessionId="fork")
    answered = line("d", "c", text("12."), reply="m2", sessionId="fork")
    original = write_lines(tmp_path / "1.jsonl", *talk("original"))
    fork = write_lines(tmp_path / "2.jsonl", *talk("fork"), asked, answered)
    files = (fork, original) if is_fork_first else (original, fork)
    rows = read("claude_code", *files)
    if is_fork_first:
        assert refusals(rows) == [(2, "copied from another session")]
        (row,) = (row for row in rows if hasattr(row, "messages"))
        assert [m.get("weight") for m in row.messages] == [None] * 4
    else:
        first, second = conversations(rows)
        assert (second.id, second.parent) == ("fork", "original")
        assert [m.get("weight") for m in second.messages] == [None, 0, None, None]
        assert [row.usage.completion_tokens for row in (first, second)] == [2, 2]


def test_forks_that_claude_code_wrote_hold_what_the_endpoint_saw_and_are_trained_once():
    seen = seen_calls("claude_code", "forks/forks.seen.json")
    files = (_FOLDER / "forks" / f"{name}.jsonl" for name in ("agent-fork", "fork", "original"))
    agent, main, fork = conversations(read("claude_code", *files))
    of_agent = next(c for c in seen if c["messages"][-1]["content"] == "It costs 30.")
    assert compared(agent.messages) == compared(of_agent["messages"])
    assert compared(main.messages) == compared(seen[-2]["messages"])
    assert compared(fork.messages) == compared(seen[-1]["messages"])
    assert (agent.parent, fork.parent, main.parent) == (main.id, main.id, None)
    trained = [
        m["content"]
        for row in (agent, main, fork)
        for m in row.messages
        if m["role"] == "assistant" and "weight" not in m
    ]
    replies = ["Answer 2.", "I ask.", "Answer 6.", "Answer 8."]
    assert trained == ["It costs 30.", *replies, "Answer 10."]
    assert (agent.usage, fork.usage) == (
        Usage(prompt_tokens=20, completion_tokens=2),
        Usage(prompt_tokens=10, completion_tokens=3),
    )


def test_a_forked_sub_agent_without_its_session_says_what_it_lacks():
    (agent,) = conversations(read("claude_code", _FOLDER / "forks" / "agent-fork.jsonl"))
    assert agent.dropped == (_CONTEXT, "earlier messages are not in the file")


@pytest.mark.parametrize("names", [("a", "b", "c"), ("c", "b", "a"), ("c", "a", "b")])
def test_copies_with_ids_of_their_own_are_trained_once(names, tmp_path):
    def copied(uuid, parent, content, origin, *, session, **more):
        named = {"sessionId": origin[0], "messageUuid": origin}
        return line(uuid, parent, content, sessionId=session, forkedFrom=named, **more)

    def own(session, parent):
        return (
            line(f"{session}3", parent, f"I am {session}", sessionId=session),
            line(
                f"{session}4", f"{session}3", text("Yes."), reply=f"m{session}", sessionId=session
            ),
        )

    talk = (line("a1", None, "Hi", sessionId="a"),
            line("a2", "a1", text("Hello."), reply="m1", sessionId="a"))  # fmt: skip
    files = {
        name: write_lines(tmp_path / f"{name}.jsonl", *rows)
        for name, rows in (
            ("a", (*talk, *own("a", "a2"))),
            ("b", (copied("b1", None, "Hi", "a1", session="b"),
                   copied("b2", "b1", text("Hello."), "a2", reply="m1", session="b"),
                   *own("b", "b2"))),
            ("c", (copied("c1", None, "Hi", "b1", session="c"),
                   copied("c2", "c1", text("Hello."), "b2", reply="m1", session="c"),
                   *own("c", "c2"))),
        )
    }  # fmt: skip
    rows = conversations(read("claude_code", *(files[name] for name in names)))
    weights = [m.get("weight") for row in rows for m in row.messages if m["role"] == "assistant"]
    assert rows[0].id == "a"
    assert weights == [None, None, 0, None, 0, None]
    assert {row.parent for row in rows[1:]} == {"a"}
