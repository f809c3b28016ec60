"""Threads of Codex: one written by the program itself, and others with its odd lines."""

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

_FILE = SAMPLES / "codex" / "rollout-thread.jsonl"
_META = {"type": "session_meta", "payload": {"id": "t", "model_provider": "openai"}}
_TURN = {"type": "turn_context", "payload": {"model": "gpt-x"}}


def item(kind, **fields):
    return {
        "timestamp": "2026-03-01T10:00:00Z",
        "type": "response_item",
        "payload": {"type": kind, **fields},
    }


def message(role, words):
    kind = "output_text" if role == "assistant" else "input_text"
    return item("message", role=role, content=[{"type": kind, "text": words}])


def event(kind, **fields):
    return {"type": "event_msg", "payload": {"type": kind, **fields}}


def used(prompt, completion):
    usage = {"input_tokens": prompt, "output_tokens": completion, "cached_input_tokens": 1}
    return event("token_count", info={"total_token_usage": usage})


def thread(tmp_path, *rows):
    path = write_lines(tmp_path / "rollout-x.jsonl", _META, _TURN, *rows)
    return read("codex", path)


def test_a_thread_that_codex_wrote_holds_what_the_endpoint_saw():
    _, main, summing_up, last = seen_calls("codex", "rollout-thread.seen.json")
    first, later = conversations(read("codex", _FILE))
    assert compared(first.messages) == compared(main["messages"])
    assert compared(later.messages) == compared(last["messages"])
    assert (first.usage, later.usage) == (
        Usage(
            prompt_tokens=100 + main["prompt_tokens"] + summing_up["prompt_tokens"],
            completion_tokens=9 + main["completion_tokens"] + summing_up["completion_tokens"],
        ),
        Usage(prompt_tokens=last["prompt_tokens"], completion_tokens=last["completion_tokens"]),
    )
    assert (later.parent, later.group, later.id) == (first.id, first.id, f"{first.id}/1")
    assert {first.model, later.model} == {main["model"]}
    assert (first.losses, later.losses) == (("images left out",), ())


def test_what_codex_prints_is_refused_with_the_place_of_its_threads():
    (row,) = read("codex_exec", SAMPLES / "codex_exec" / "printed.jsonl")
    assert row.reason == "the output of `codex exec --json` lacks the prompts and the tools' calls"
    assert "~/.codex/sessions" in row.detail


def test_going_back_to_an_earlier_turn_begins_a_branch(tmp_path):
    rows = thread(
        tmp_path,
        message("user", "Hi"),
        event("user_message", message="Hi"),
        message("assistant", "Hello."),
        message("user", "Price?"),
        event("user_message", message="Price?"),
        message("assistant", "12."),
        used(30, 4),
        event("thread_rolled_back", num_turns=1),
        message("user", "Price in euros?"),
        event("user_message", message="Price in euros?"),
        message("assistant", "12 euros."),
        used(50, 7),
    )
    first, second = conversations(rows)
    assert shown(first.messages)[2:] == ["user Price?", "assistant 12."]
    assert shown(second.messages) == [
        "user Hi",
        "assistant Hello.",
        "user Price in euros?",
        "assistant 12 euros.",
    ]
    assert [m.get("weight") for m in second.messages] == [None, 0, None, None]
    assert second.usage == Usage(prompt_tokens=20, completion_tokens=3)
    assert (second.id, second.parent) == ("t/1", "t")


def test_tools_of_other_kinds_become_calls_and_what_the_provider_runs_is_named(tmp_path):
    (row,) = conversations(
        thread(
            tmp_path,
            message("user", "Mend it"),
            item("reasoning", summary=[], encrypted_content="gAAA"),
            item("local_shell_call", call_id="a", action={"type": "exec", "command": ["ls"]}),
            item("function_call_output", call_id="a", output={"content": "x", "success": True}),
            item("custom_tool_call", call_id="b", name="apply_patch", input="*** Begin\n"),
            item("custom_tool_call_output", call_id="b", output="Done"),
            item("web_search_call", action={"type": "search", "query": "lamps"}),
            item("ghost_snapshot", ghost_commit={}),
            message("assistant", "It is mended."),
        )
    )
    assert shown(row.messages) == [
        "user Mend it",
        'assistant  local_shell{"type": "exec", "command": ["ls"]}',
        "tool x",
        'assistant  apply_patch{"input": "*** Begin\\n"}',
        "tool Done",
        "assistant It is mended.",
    ]
    assert row.losses == (
        "reasoning is encrypted or redacted",
        "calls of tools that the provider runs left out",
    )
    assert (row.provider, row.model) == ("openai", "gpt-x")


def test_a_compaction_of_an_old_codex_keeps_the_summary_alone(tmp_path):
    rows = thread(
        tmp_path,
        message("user", "Hi"),
        message("assistant", "Hello."),
        {"type": "compacted", "payload": {"message": "They said hello."}},
        message("user", "And now?"),
        message("assistant", "Now we go on."),
    )
    _, later = conversations(rows)
    assert shown(later.messages)[0] == "user They said hello."
    assert later.losses == ("earlier messages are not in the file",)


def test_a_file_without_envelopes_is_read_too(tmp_path):
    path = write_lines(
        tmp_path / "rollout-2025-05-01.jsonl",
        {"id": "old", "timestamp": "2025-05-01T10:00:00Z", "instructions": None},
        {"record_type": "state"},
        message("user", "Hi")["payload"],
        message("assistant", "Hello.")["payload"],
    )
    assert recognised_by(path) == ["codex"]
    (row,) = conversations(read("codex", path))
    assert (shown(row.messages), row.id) == (["user Hi", "assistant Hello."], "old")


def test_the_thread_of_a_sub_agent_and_a_fork_name_where_they_come_from(tmp_path):
    spawned = {"subagent": {"thread_spawn": {"parent_thread_id": "p"}}}
    talk = (message("user", "Hi"), message("assistant", "Hello."))
    for meta in ({"source": spawned}, {"forked_from_id": "p"}):
        row = {"type": "session_meta", "payload": {"id": "t"} | meta}
        copy = {"type": "session_meta", "payload": {"id": "p"}}
        path = write_lines(tmp_path / "rollout-x.jsonl", row, copy, *talk)
        (found,) = conversations(read("codex", path))
        assert (found.id, found.parent) == ("t", "p")


def test_broken_lines_and_threads_without_replies_are_refused(tmp_path):
    rows = thread(
        tmp_path,
        b"{broken",
        message("user", "Hi"),
        {"type": "response_item", "payload": 5},
        {"type": "event_msg", "payload": {"type": "token_count", "info": None}},
        {"type": "event_msg", "payload": {"type": "thread_rolled_back", "num_turns": "x"}},
        message("user", "Anyone?"),
        item("function_call", name=5, call_id="a"),
    )
    assert refusals(rows) == [
        (3, "not a JSON object"),
        (1, "holds no reply of the model"),
        (7, "items of an unknown kind"),
    ]
