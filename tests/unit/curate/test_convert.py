import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fakes.foreign_rollouts import GYM_ROW, RNOW_ROW, write_rnow
from fakes.rollout_lines import BAD_LINES, deep, encoded, rollout_lines, row_with
from fakes.rollout_rows import (
    assistant,
    read_rows,
    rollout_row,
    tool_call,
    tool_reply,
    user,
    write_lines,
)
from stillroom import api
from stillroom.curate.convert import ConvertResult, ConvertRollouts, convert_rollouts
from stillroom.curate.pairs import MakeDpoPairs, make_dpo_pairs
from stillroom.data.formats import load_sft_rows
from stillroom.errors import DataError, EngineError, InputError
from stillroom.files import content_hash
from stillroom.lineage import read_manifest
from stillroom.settings import Workspace
from stillroom.trace.request import ShowLineage
from stillroom.trace.show import show_lineage

OPEN = [user("a"), assistant(None, tool_call())]
CALLING = [*OPEN, tool_reply("12"), assistant("12")]
SCHEMA = {"type": "function", "function": {"name": "price", "parameters": {}}}


def convert(
    folder: Path, source: str | list[str] = "rollouts.jsonl", **options: Any
) -> ConvertResult:
    request = ConvertRollouts(input=source, **{"output": "train.jsonl", **options})
    return convert_rollouts(Workspace(folder), request)


def test_which_turns_are_trained_goes_with_the_rows_and_to_trl_as_its_page_says(
    tmp_path: Path,
) -> None:
    messages = [
        *(user("a"), assistant("one") | {"weight": 0}),
        *(user("b"), assistant("two")),
        *(user("c"), assistant("three") | {"weight": 1}),
    ]
    write_lines(tmp_path / "rollouts.jsonl", [encoded(rollout_row(messages=messages))])

    convert(tmp_path)

    [row] = read_rows(tmp_path / "train.jsonl")
    assert row["messages"] == messages
    page = (Path(__file__).parents[3] / "docs" / "trl.md").read_text(encoding="utf-8")
    [shown] = [part for part in page.split("```python") if "prompt_and_completion" in part]
    names: dict[str, Any] = {}
    exec(textwrap.dedent(shown.partition("```")[0]), names)  # noqa: S102 - our own page
    rows = list(names["prompt_and_completion"](row))
    assert [(r["prompt"], r["completion"]) for r in rows] == [
        (messages[:3], messages[3:4]),
        (messages[:5], messages[5:]),
    ]
    assert rows[0]["task_id"] == row["task_id"]


def test_successes_become_rows_that_can_be_trained_on(tmp_path: Path) -> None:
    lines = [
        rollout_row(task_id="a", metadata={"task_type": "x"}),
        rollout_row(task_id="b", success=False),
        rollout_row(task_id="c", success=None, reward=None),
        rollout_row(task_id="d", success=None, reward=None, messages=OPEN),
        rollout_row(task_id="e", messages=[user("a")]),
        rollout_row(task_id="f", error={"class": "timeout", "message": "x"}),
    ]
    write_lines(tmp_path / "rollouts.jsonl", [*map(encoded, lines), b"{broken"])

    result = convert(tmp_path)

    assert (result.read, result.converted, result.success_derived) == (7, 2, 1)
    assert result.left_out == {
        "no success": 1,
        "no complete answer": 1,
        "no assistant message": 1,
        "ended by an infrastructure failure": 1,
        "not a rollout row": 1,
    }
    assert [p.split(": ")[0] for p in result.problems] == [f"{tmp_path}/rollouts.jsonl:7"]
    rows = read_rows(tmp_path / "train.jsonl")
    assert [row["task_id"] for row in rows] == ["a", "c"]
    assert rows[0]["metadata"] == {"task_type": "x"}
    assert [row["reward"] for row in rows] == [1.0, None]
    assert len(load_sft_rows(tmp_path / "train.jsonl")) == 2


def test_what_is_taken_over_is_taken_byte_for_byte(tmp_path: Path) -> None:
    messages = (
        rb'[ {"role":"user","content":"\u00fc \/ 1.0"},{"role":"assistant","content":"7" ,"x":1e2}]'
    )
    tools = rb'[{"type":"function","function":{"name":"f","parameters":{"b":null,  "a":1.00}}}]'
    metadata = rb'{"big":123456789012345678901234567890,"z":1,"a":-0.0}'
    line = b'{"messages":%s,"stop_reason":"answered","tools":%s,"metadata":%s,"reward":1.50}' % (
        messages,
        tools,
        metadata,
    )
    write_lines(tmp_path / "rollouts.jsonl", [line])

    convert(tmp_path)

    prompt = [{"role": "user", "content": "ü / 1.0"}]
    task_id = b'"%s"' % content_hash({"messages": prompt}).encode()
    assert (tmp_path / "train.jsonl").read_bytes() == (
        b'{"messages":%s,"tools":%s,"metadata":%s,"reward":1.50,"task_id":%s,"rollout_id":null}\n'
        % (messages, tools, metadata, task_id)
    )


@pytest.mark.parametrize(
    ("source", "output"),
    [
        ("rollouts/a.jsonl", "rollouts/a.jsonl"),
        ("rollouts", "rollouts/a.jsonl"),
        ("rollouts/a.jsonl", "link.jsonl"),
        ("link.jsonl", "rollouts/a.jsonl"),
    ],
)
def test_rollouts_are_never_replaced_by_what_is_made_of_them(
    tmp_path: Path, source: str, output: str
) -> None:
    path = write_lines(tmp_path / "rollouts" / "a.jsonl", [encoded(rollout_row())])
    (tmp_path / "link.jsonl").symlink_to(path)
    before = path.read_bytes()

    with pytest.raises(InputError, match="is also an input"):
        convert(tmp_path, source, output=output)
    assert path.read_bytes() == before


def test_nothing_to_convert_is_an_error_that_says_why_and_keeps_the_old_rows(
    tmp_path: Path,
) -> None:
    write_lines(tmp_path / "train.jsonl", [b"old"])
    lines = [encoded(rollout_row(success=False)), b"{broken"]
    write_lines(tmp_path / "rollouts.jsonl", lines)

    with pytest.raises(DataError) as caught:
        convert(tmp_path, overwrite=True)
    assert "none of the 2 rows" in caught.value.problem
    assert "(no success: 1, not a rollout row: 1)" in caught.value.problem
    assert f"{tmp_path}/rollouts.jsonl:2" in caught.value.problem
    assert (tmp_path / "train.jsonl").read_bytes() == b"old\n"

    write_lines(tmp_path / "rollouts.jsonl", [])
    with pytest.raises(DataError, match="no rows, as the input is empty"):
        convert(tmp_path, overwrite=True)


def test_rows_of_an_unknown_layout_are_refused_with_a_row_that_would_be_read(
    tmp_path: Path,
) -> None:
    write_lines(tmp_path / "rollouts.jsonl", [b'{"q": "2 + 2?", "a": "4"}'])

    with pytest.raises(DataError) as caught:
        convert(tmp_path)

    assert "import_rollouts" in caught.value.fix
    shown = caught.value.fix[caught.value.fix.index('{"messages"') :]
    write_lines(tmp_path / "rollouts.jsonl", [shown.encode()])
    assert convert(tmp_path).converted == 1


def test_rollouts_of_another_run_are_not_replaced_either(tmp_path: Path) -> None:
    write_lines(tmp_path / "rollouts.jsonl", [encoded(rollout_row())])
    other = write_lines(tmp_path / "other.jsonl", [b"paid for"])
    write_lines(tmp_path / ".other.jsonl" / "settings.json", [b"{}"])

    with pytest.raises(InputError, match="holds rollouts that generate_rollouts wrote"):
        convert(tmp_path, output="other.jsonl")
    assert other.read_bytes() == b"paid for\n"


def test_a_file_that_a_rollout_run_only_touched_can_be_written(tmp_path: Path) -> None:
    write_lines(tmp_path / "rollouts.jsonl", [encoded(rollout_row())])
    write_lines(tmp_path / "train.jsonl", [b"old"])
    # A run that was refused this output took its lock first.
    write_lines(tmp_path / ".train.jsonl" / "lock", [])
    write_lines(tmp_path / "empty.jsonl", [])
    write_lines(tmp_path / ".empty.jsonl" / "settings.json", [b"{}"])

    for output in ("train.jsonl", "empty.jsonl"):
        assert convert(tmp_path, output=output, overwrite=True).converted == 1


def test_whatever_is_converted_can_be_loaded_again(tmp_path: Path) -> None:
    lines = [encoded(rollout_row())]
    lines += [row_with(b"metadata", b'{"a":' + deep(depth) + b"}") for depth in (800, 10_000)]
    lines += [row_with(b"tools", b'["\xff"]'), row_with(b"metadata", b'{"a":"\xff"}')]
    write_lines(tmp_path / "rollouts.jsonl", lines)

    result = convert(tmp_path)

    assert (result.read, result.converted) == (5, 2)
    assert len(load_sft_rows(tmp_path / "train.jsonl")) == result.converted


def is_success(row: dict[str, Any]) -> bool:
    if row["success"] is not None:
        return row["success"]
    if row["reward"] is not None:
        return row["reward"] >= 0.5
    return row["stop_reason"] == "answered" and "tool_calls" not in row["messages"][-1]


@settings(max_examples=50)
@given(st.lists(rollout_lines() | st.sampled_from(BAD_LINES), max_size=8), st.booleans())
def test_the_counts_add_up_and_good_rows_are_never_lost(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], include_failed: bool
) -> None:
    folder = tmp_path_factory.mktemp("convert")
    write_lines(folder / "rollouts.jsonl", lines)
    good = [json.loads(line) for line in lines if line not in BAD_LINES]
    wanted = [row for row in good if include_failed or is_success(row)]

    try:
        result = convert(folder, include_failed=include_failed)
    except DataError:
        assert wanted == []
        assert not (folder / "train.jsonl").exists()
        return
    assert result.read == len(lines) == result.converted + sum(result.left_out.values())
    assert result.left_out.get("not a rollout row", 0) == len(lines) - len(good)
    keys = ("messages", "tools", "metadata", "reward", "task_id")
    rows = read_rows(folder / "train.jsonl")
    assert rows == [{key: row[key] for key in keys} | {"rollout_id": row["id"]} for row in wanted]


def test_rollouts_of_other_systems_become_rows_too(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    write_rnow(folder, RNOW_ROW, {**RNOW_ROW, "completed": "error", "success": False})
    wrong = {**GYM_ROW, "reward": 0.0, "_ng_rollout_index": 1}
    write_lines(folder / "gym.jsonl", map(encoded, [GYM_ROW, wrong]))

    result = convert(tmp_path, "rollouts")

    # The rewards decide: rnow's `success: true` only says that the rollout ran.
    assert (result.read, result.converted, result.success_derived) == (4, 2, 2)
    assert result.left_out == {"ended by an infrastructure failure": 1, "no success": 1}
    gym, rnow = read_rows(tmp_path / "train.jsonl")
    assert rnow["messages"] == RNOW_ROW["conversation"]
    assert (rnow["reward"], rnow["metadata"]) == (0.75, RNOW_ROW["metadata"])
    roles = [message["role"] for message in gym["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert gym["tools"][0]["function"]["name"] == "price"
    assert len(load_sft_rows(tmp_path / "train.jsonl")) == 2


def test_a_rollout_of_rnow_that_did_not_complete_is_converted_with_the_failed_ones(
    tmp_path: Path,
) -> None:
    row = {key: value for key, value in RNOW_ROW.items() if key != "success"}
    write_rnow(tmp_path / "rollouts", {**row, "completed": False})
    with pytest.raises(DataError, match="no success: 1"):
        convert(tmp_path, "rollouts")
    assert convert(tmp_path, "rollouts", include_failed=True).converted == 1


def write_run(folder: Path, run_id: str, request: dict, result: dict | None = None) -> None:
    run = folder / "runs" / run_id
    run.mkdir(parents=True)
    about = {"kind": "rollouts", "workspace": str(folder), "request": request}
    (run / "request.json").write_text(json.dumps(about))
    state = {"run_id": run_id, "kind": "rollouts", "status": "running", "created_at": "t"}
    (run / "run.json").write_text(json.dumps(state | {"result": result}))
    write_lines(run / "events.jsonl", [b"{}"])


def test_runs_files_and_folders_are_converted_together_and_counted_apart(tmp_path: Path) -> None:
    bad = encoded(rollout_row(success=False))
    write_lines(tmp_path / "rollouts" / "a.jsonl", [encoded(rollout_row(task_id="a")), bad])
    write_lines(tmp_path / "rollouts" / "b.jsonl", [encoded(rollout_row(task_id="b"))])
    write_lines(tmp_path / "c.jsonl", [encoded(rollout_row(task_id="c")), b"{"])
    write_run(tmp_path, "rollouts-x", {"output": "rollouts/b.jsonl"})
    rows = write_lines(tmp_path / "runs" / "eval-y" / "rollouts.jsonl", [encoded(rollout_row())])
    write_run(tmp_path / "other", "eval-y", {}, {"rollouts": str(rows)})
    run_folder = "other/runs/eval-y"

    result = convert(tmp_path, ["rollouts-x", "rollouts", "c.jsonl", run_folder])

    assert (result.read, result.converted) == (6, 4)
    assert [(s.source, s.read, s.converted, s.left_out) for s in result.sources] == [
        # The folder holds it too; no row is taken twice.
        ("rollouts-x: rollouts/b.jsonl", 1, 1, {}),
        ("rollouts/a.jsonl", 2, 1, {"no success": 1}),
        ("c.jsonl", 2, 1, {"not a rollout row": 1}),
        ("eval-y: runs/eval-y/rollouts.jsonl", 1, 1, {}),
    ]
    assert [row["rollout_id"] for row in read_rows(tmp_path / "train.jsonl")] == [
        "b-0", "a-0", "c-0", "task-0"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "text"),
    [("sft-x", "has written no rollouts"), ("sft-z", "does not exist"), ("damaged", "damaged")],
)
def test_a_run_without_rollouts_is_refused(tmp_path: Path, source: str, text: str) -> None:
    write_run(tmp_path, "sft-x", {"config": "sft.yml"})
    write_run(tmp_path, "damaged", {})
    (tmp_path / "runs" / "damaged" / "run.json").write_bytes(b"{")

    with pytest.raises(InputError, match=text):
        convert(tmp_path, source)


def test_many_files_are_counted_in_one_after_the_first_twenty(tmp_path: Path) -> None:
    write_rnow(tmp_path / "rollouts", *[RNOW_ROW] * 30)

    result = convert(tmp_path, "rollouts")

    assert len(result.sources) == 21
    assert (result.sources[-1].source, result.sources[-1].converted) == ("10 more files", 10)
    assert sum(source.read for source in result.sources) == result.read == 30


def test_the_model_that_answered_in_nemo_gym_is_on_record(tmp_path: Path) -> None:
    rows = [{**GYM_ROW, "_ng_rollout_index": number} for number in range(3)]
    write_lines(tmp_path / "rollouts.jsonl", map(encoded, rows))
    request = ConvertRollouts(input="rollouts.jsonl", output="sft.jsonl")

    convert_rollouts(Workspace(tmp_path), request)

    manifest = read_manifest(tmp_path / "sft.jsonl")
    assert manifest is not None
    [teacher] = manifest.models
    assert (teacher.role, teacher.name, teacher.location) == ("policy", "m", "nemo_gym")
    assert [(one.model, one.rows) for one in teacher.answered_by] == [("m", 3)]


def own_rows(num_prompts: int, per_prompt: int = 2) -> list[dict]:
    """A student's rollouts: of each prompt so many right ones, and a wrong one."""
    return [
        rollout_row(
            task_id=f"own{prompt}",
            sample=sample,
            reward=float(sample < per_prompt),
            success=sample < per_prompt,
            messages=[user("a"), assistant(f"{prompt}.{sample}")],
        )
        for prompt in range(num_prompts)
        for sample in range(per_prompt + 1)
    ]


@pytest.mark.parametrize(
    ("options", "num"),
    [({}, 4), ({"own_share": 0.8}, 10), ({"own_share": 0.8, "own_per_prompt": 2}, 16)],
)
def test_right_rollouts_of_the_student_are_mixed_in_up_to_a_share_and_a_number_of_each_prompt(
    tmp_path: Path, options: dict, num: int
) -> None:
    write_lines(
        tmp_path / "rollouts.jsonl", [encoded(rollout_row(task_id=f"t{i}")) for i in "abcd"]
    )
    write_lines(tmp_path / "own.jsonl", map(encoded, own_rows(10)))

    result = convert(tmp_path, own="own.jsonl", **options)

    assert (result.converted, result.read) == (4 + num, 34)
    beyond = {k: v for k, v in result.left_out.items() if k.startswith("beyond own_")}
    assert result.left_out == {"no success": 10, **beyond}
    assert sum(beyond.values()) == 20 - num
    per_prompt = options.get("own_per_prompt", 1)
    rows = read_rows(tmp_path / "train.jsonl")
    own = [row for row in rows if row["task_id"].startswith("own")]
    assert len(own) == num
    assert max(sum(r["task_id"] == row["task_id"] for r in own) for row in own) <= per_prompt
    assert all(row["reward"] == 1 for row in own)
    inputs = read_manifest(tmp_path / "train.jsonl").inputs  # type: ignore[union-attr]
    assert [Path(record.path).name for record in inputs] == ["rollouts.jsonl", "own.jsonl"]
    # The same rows in another order give the same choice.
    before = {row["rollout_id"] for row in own}
    write_lines(tmp_path / "own.jsonl", map(encoded, own_rows(10)[::-1]))
    convert(tmp_path, own="own.jsonl", overwrite=True, **options)
    again = {r["rollout_id"] for r in read_rows(tmp_path / "train.jsonl")}
    assert before <= again


def test_own_rollouts_are_named_once_and_their_options_not_without_them(tmp_path: Path) -> None:
    write_lines(tmp_path / "rollouts.jsonl", [encoded(rollout_row())])

    with pytest.raises(InputError, match="is given both as input and as own"):
        convert(tmp_path, own="rollouts.jsonl")
    with pytest.raises(InputError, match="own_share requires own"):
        convert(tmp_path, own_share=0.3)
    # A run's recorded request names every option.
    recorded = ConvertRollouts(input="rollouts.jsonl", output="train.jsonl").model_dump()
    convert_rollouts(Workspace(tmp_path), ConvertRollouts(**recorded))
    # Without a row of the teacher there is nothing to mix them into.
    write_lines(tmp_path / "own.jsonl", map(encoded, own_rows(1)))
    write_lines(tmp_path / "rollouts.jsonl", [encoded(rollout_row(success=False))])
    with pytest.raises(DataError, match="none of the 1 rows"):
        convert(tmp_path, own="own.jsonl")


@pytest.mark.parametrize(("system", "first"), [("", []), ("Be a clerk.", ["Be a clerk."])])
def test_rows_are_written_without_what_the_teacher_was_given_and_say_so(
    tmp_path: Path, system: str, first: list[str]
) -> None:
    rules = {"role": "system", "content": "Be a clerk.\n\nAdd seven to each price."}
    kept = {"role": "system", "content": "Be a clerk."}
    rows = [
        rollout_row(messages=[rules, *OPEN, assistant("12")]),
        rollout_row(sample=1, messages=[kept, *OPEN, assistant("5")]),
        rollout_row(sample=2, messages=[*OPEN, assistant("5")]),
    ]
    write_lines(tmp_path / "rollouts.jsonl", map(encoded, rows))

    convert(tmp_path, system=system)

    written = read_rows(tmp_path / "train.jsonl")
    expected = [{"role": "system", "content": text} for text in first]
    assert [row["messages"][: -len(OPEN) - 1] for row in written] == [expected] * 3
    assert written[0]["removed_system"] == {
        "sha256": content_hash(rules["content"]),
        "begins": "Be a clerk.",
    }
    # What a row has already is not removed.
    assert ("removed_system" in written[1]) == (system == "")
    assert "removed_system" not in written[2]
    assert load_sft_rows(tmp_path / "train.jsonl")
    manifest = read_manifest(tmp_path / "train.jsonl")
    assert manifest is not None
    assert manifest.request["system"] == system


REWRITE = '''
import json
from stillroom.tools import ToolArgs, tool

@tool
def rewrite(answer: str, args: ToolArgs) -> str:
    """Says a JSON answer as a line."""
    fields = json.loads(answer)
    if fields is None:
        return None
    return ", ".join(map(str, fields.values())) + args.metadata.get("end", "")
'''


def test_answers_are_rewritten_by_a_function_of_the_users_and_lead_back_to_their_rollouts(
    tmp_path: Path,
) -> None:
    (tmp_path / "rewrite.py").write_text(REWRITE, encoding="utf-8")
    answers = ['{"topic": "billing", "priority": "high"}', "no JSON", "{}", "null"]
    rows = [
        rollout_row(task_id=f"t{n}", messages=[user("x"), assistant(said)], metadata={"end": ""})
        for n, said in enumerate(answers)
    ]
    rows.append(rollout_row(task_id="t9", messages=OPEN))
    write_lines(tmp_path / "rollouts.jsonl", map(encoded, rows))
    request = ConvertRollouts(
        input="rollouts.jsonl", output="train.jsonl", rewrite="rewrite.py", include_failed=True
    )

    result = api.convert_rollouts(Workspace(tmp_path), request)

    assert result.left_out == {
        "rewrite failed": 1, "rewrite returned nothing": 2, "no answer to rewrite": 1,
    }  # fmt: skip
    assert result.problems[0].startswith(f"{tmp_path}/rollouts.jsonl:2: ")
    [row] = read_rows(tmp_path / "train.jsonl")
    assert row["messages"] == [user("x"), assistant("billing, high")]
    assert row["rewritten_from"] == content_hash(answers[0])
    manifest = read_manifest(tmp_path / "train.jsonl")
    assert manifest is not None
    names = [Path(record.path).name for record in manifest.inputs]
    assert names == ["rollouts.jsonl", "rewrite.py"]
    lineage = show_lineage(Workspace(tmp_path), ShowLineage(path="train.jsonl", row=1))
    assert lineage.row[1].at == "rollouts.jsonl:1"


def test_the_fix_names_the_function_if_it_fails_for_every_row(tmp_path: Path) -> None:
    (tmp_path / "rewrite.py").write_text(REWRITE, encoding="utf-8")
    write_lines(
        tmp_path / "rollouts.jsonl",
        [encoded(rollout_row(messages=[user("x"), assistant("no JSON")]))],
    )

    with pytest.raises(DataError, match="rewrite failed: 1") as caught:
        convert(tmp_path, rewrite="rewrite.py")
    assert "correct the function rewrite" in caught.value.fix


def test_a_file_without_the_function_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rewrite.py").write_text("def rewrite(answer): ...", encoding="utf-8")
    write_lines(tmp_path / "rollouts.jsonl", [encoded(rollout_row())])

    with pytest.raises(EngineError, match="rewrite"):
        convert(tmp_path, rewrite="rewrite.py")
    assert not (tmp_path / "train.jsonl").exists()
    with pytest.raises(ValidationError, match="leave ray_address out"):
        ConvertRollouts(input="a", output="b", rewrite="c", ray_address="local")


def test_converted_rows_that_call_tools_without_their_schemas_are_counted_in_a_note(
    tmp_path: Path,
) -> None:
    write_rnow(tmp_path / "rollouts", RNOW_ROW | {"completed": True})
    write_lines(
        tmp_path / "more.jsonl",
        [encoded(rollout_row()), encoded(rollout_row(messages=CALLING, tools=[SCHEMA]))],
    )

    result = convert(tmp_path, ["rollouts", "more.jsonl"])

    [note] = result.notes
    assert note.startswith("1 of 3 rows call tools but have no `tools`: ")
    assert convert(tmp_path, "more.jsonl", output="other.jsonl").notes == []


def test_an_empty_file_is_refused_as_empty_and_not_for_its_rows(tmp_path: Path) -> None:
    (tmp_path / "rollouts.jsonl").write_bytes(b"")
    with pytest.raises(DataError) as caught:
        convert(tmp_path)
    assert caught.value.problem == "rollouts.jsonl: no rows, as the input is empty"
    request = MakeDpoPairs(input="rollouts.jsonl", output="pairs.jsonl")
    with pytest.raises(DataError) as paired:
        make_dpo_pairs(Workspace(tmp_path), request)
    assert str(paired.value) == str(caught.value)
