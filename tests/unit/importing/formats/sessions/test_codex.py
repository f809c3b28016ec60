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
_FORK, _FORKED = (SAMPLES / "codex" / "forks" / f"rollout-{n}.jsonl" for n in ("fork", "thread"))
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
    assert row.dropped == (
        "reasoning is encrypted or redacted",
        "calls of provider-run tools left out",
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
    assert later.dropped == ("earlier messages are not in the file",)


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


def test_a_fork_that_codex_wrote_goes_on_from_the_thread_that_its_file_names():
    seen = seen_calls("codex", "forks/forks.seen.json")[-1]
    _, later, fork = conversations(read("codex", _FORK, _FORKED))
    assert compared(fork.messages) == compared(seen["messages"])
    assert fork.parent == later.id
    replies = [(m["content"], m.get("weight")) for m in fork.messages if m["role"] == "assistant"]
    assert replies == [("42 €.", 0), ("46 $.", None)]
    assert fork.usage == Usage(prompt_tokens=95, completion_tokens=5)
    assert fork.dropped == ()


def test_a_fork_without_the_thread_that_it_goes_on_from_says_what_it_lacks():
    (fork,) = conversations(read("codex", _FORK))
    assert shown(fork.messages)[1:] == ["user And in dollars?", "assistant 46 $."]
    assert fork.dropped == ("earlier messages are not in the file",)
    assert fork.usage == Usage(prompt_tokens=95, completion_tokens=5)


def forked(tmp_path, name, origin, *rows, **meta):
    """The file of a thread; with an origin, of one that begins with a copy of another's lines."""
    copied = {"forked_from_id": origin} if origin else {}
    first = {"type": "session_meta", "payload": {"id": name} | copied | meta}
    return write_lines(tmp_path / f"rollout-{name}.jsonl", first, *rows)


_TALK = (
    {"type": "session_meta", "payload": {"id": "p"}},
    message("user", "Hi"),
    item("reasoning", summary=[]),
    item("function_call", name="ls", arguments="{}", call_id="a"),
    item("function_call_output", call_id="a", output="x"),
    message("assistant", "Hello."),
    used(30, 5),
)


def test_what_a_fork_copied_from_a_thread_of_the_import_is_trained_there_alone(tmp_path):
    parent = forked(tmp_path, "p", None, *_TALK[1:], message("user", "Go on"),
                    message("assistant", "I go on."), used(40, 7))  # fmt: skip
    child = forked(tmp_path, "a", "p", *_TALK, message("user", "Price?"),
                   message("assistant", "12."), used(45, 9))  # fmt: skip
    grandchild = forked(tmp_path, "b", "a", *_TALK, message("user", "Price?"),
                        message("assistant", "12."), used(45, 9), message("user", "In euros?"),
                        message("assistant", "Hello."), used(50, 10))  # fmt: skip
    main, first, second = conversations(read("codex", grandchild, child, parent))
    assert [m.get("weight") for m in main.messages] == [None] * 6
    assert shown(first.messages)[3:] == ["assistant Hello.", "user Price?", "assistant 12."]
    assert [m.get("weight") for m in first.messages] == [None, 0, None, 0, None, None]
    weights = [m.get("weight") for m in second.messages if m["role"] == "assistant"]
    assert weights == [0, 0, 0, None]  # the last one's text is that of a copy, but it is new
    assert [(row.id, row.parent) for row in (main, first, second)] == [
        ("p", None),
        ("a", "p"),
        ("b", "a"),
    ]
    assert [row.usage.completion_tokens for row in (main, first, second)] == [7, 4, 1]


def test_forks_of_a_thread_that_is_not_there_train_what_they_share_once(tmp_path):
    copies = [
        forked(tmp_path, name, "p", *_TALK, message("user", name), message("assistant", "Yes."))
        for name in ("a", "b")
    ]
    first, second = conversations(read("codex", *copies))
    assert [m.get("weight") for m in first.messages] == [None] * 6
    assert [m.get("weight") for m in second.messages] == [None, 0, None, 0, None, None]
    assert (first.parent, second.parent) == ("p", "a")


def test_a_fork_that_nobody_went_on_with_is_a_copy(tmp_path):
    parent, copy = forked(tmp_path, "p", None, *_TALK[1:]), forked(tmp_path, "a", "p", *_TALK)
    _, row = read("codex", parent, copy)
    assert (row.location.path, row.reason) == (copy, "copied from another session")
    assert "in p" in row.detail


def test_a_thread_that_lies_there_twice_is_trained_once(tmp_path):
    packed = forked(tmp_path, "p", None, *_TALK[1:])
    later = (message("user", "Go on"), message("assistant", "I go on."), used(40, 7))
    whole = write_lines(tmp_path / "rollout-p-on.jsonl", *_TALK, *later)
    for paths in ((packed, whole), (whole, packed)):
        talk, copy = read("codex", *paths)
        assert [m.get("weight") for m in talk.messages] == [None] * 6
        assert (talk.location.path, talk.usage.completion_tokens) == (whole, 7)
        assert (copy.location.path, copy.reason) == (packed, "copied from another session")


def test_two_files_of_a_thread_that_went_apart_share_what_is_trained(tmp_path):
    first = forked(tmp_path, "p", None, *_TALK[1:], message("user", "A much longer question?"),
                   message("assistant", "Yes."))  # fmt: skip
    later = (message("user", "On"), message("assistant", "No."))
    second = write_lines(tmp_path / "rollout-p-on.jsonl", *_TALK, *later)
    whole, branch = conversations(read("codex", second, first))
    assert [m.get("weight") for m in whole.messages] == [None] * 6
    assert [m.get("weight") for m in branch.messages] == [None, 0, None, 0, None, None]
    assert branch.parent == "p"


def test_threads_that_are_no_forks_are_trained_whatever_others_hold(tmp_path):
    rows = read("codex", *(forked(tmp_path, name, None, *_TALK[1:]) for name in ("a", "b")))
    assert [m.get("weight") for row in conversations(rows) for m in row.messages] == [None] * 8


def test_threads_that_go_on_from_one_another_in_a_circle_are_read(tmp_path):
    def based(name, on, end):
        base = {"thread_id": on, "end_ordinal_exclusive": end}
        talk = (message("user", f"I am {name}"), message("assistant", "Yes."))
        return forked(tmp_path, name, None, *talk, history_base=base)

    rows = read("codex", based("a", "b", 9), based("b", "a", 9), based("c", "c", "x"))
    assert [row.dropped for row in conversations(rows)] == [
        ("earlier messages are not in the file",)
    ] * 3


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
        (1, "no reply from the model"),
        (7, "items of an unknown kind"),
    ]
