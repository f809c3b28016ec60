from fakes.collected_rows import logged, taken


def owners(found):
    return list(found.joined.owners)


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
