from fakes.collected_rows import FILE, logged, taken
from stillroom.importing.records import LoggedConversation, Place


def owners(found):
    return list(found.joined.owners)


def test_copies_and_earlier_calls_go_into_the_last_one(tmp_path):
    rows = [logged(1, "Hi", "Hello"), logged(2, "Hi", "Hello", "Bye", "Bye"),
            logged(3, "Hi", "Hello"), logged(4, "Hi", "Hello", "Bye", "Bye")]  # fmt: skip
    with taken(tmp_path, rows) as found:
        assert owners(found) == [1, 1, 1, 1]
        [rollout] = found.rollouts.values()
        assert rollout.kept.source == "log.jsonl:2"
        assert rollout.num_turns == 2


def test_calls_of_different_sessions_are_not_joined(tmp_path):
    rows = [logged(1, "Hi", "Hello", group="a"), logged(2, "Hi", "Hello", "Bye", "Bye", group="b"),
            logged(3, "Hi", "Hello", "Bye", "Bye")]  # fmt: skip
    with taken(tmp_path, rows) as found:
        assert owners(found) == [0, 1, 2]
        assert found.joined.branch_of == {}


def test_whole_conversations_are_never_joined(tmp_path):
    rows = [logged(n, "Hi", "Hello", is_call=False) for n in (1, 2)]
    with taken(tmp_path, rows) as found:
        assert owners(found) == [0, 1]


def test_a_compacted_history_is_a_branch_of_its_session(tmp_path):
    rows = [
        logged(1, "Hi", "Hello", "More", "Yes", group="s"),
        logged(2, "Summary: greeted", "Go on", group="s"),
    ]
    with taken(tmp_path, rows) as found:
        assert found.joined.branch_of == {1: 0}


def test_a_row_names_its_parent_also_in_a_circle(tmp_path):
    rows = [
        logged(1, "Plan", "ok", is_call=False, id="main"),
        logged(2, "Search", "done", is_call=False, id="sub", parent="main"),
        logged(3, "A", "a", is_call=False, id="x", parent="y"),
        logged(4, "B", "b", is_call=False, id="y", parent="x"),
        logged(5, "C", "c", is_call=False, id="z", parent="nobody"),
    ]
    with taken(tmp_path, rows) as found:
        assert found.joined.branch_of == {1: 0, 2: 3}


def test_long_conversations_are_joined_from_their_end_too(tmp_path):
    texts = ["m"]
    rows = []
    for n in range(300):
        texts += [f"r{n}", f"q{n}"]
        rows.append(logged(n, *texts[:-1]))
    with taken(tmp_path, rows[::-1]) as found:
        assert len(found.rollouts) == 1


def test_a_reply_to_nothing_is_refused(tmp_path):
    reply = {"role": "assistant", "content": "Hello"}
    place = Place(FILE, 1)
    rows = [
        LoggedConversation(place=place, messages=[reply], is_call=True),
        LoggedConversation(place=place, messages=[reply], is_call=False),
        logged(2, "Hi", "Hello"),
    ]
    with taken(tmp_path, rows) as found:
        assert [row.reason for row in found.refused] == ["no message before the reply"] * 2
        assert len(found.rollouts) == 1
