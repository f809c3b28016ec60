"""What a tool's result says comes next, where it depends on what the data is."""

import ast
import json
import re

import pytest

from fakes.machines import GPU_BOX, ScriptedMachines, name_machines
from fakes.source_tree import ROOT
from manual.pages import messages
from stillroom import api
from stillroom.remote.machine_list import list_machines
from stillroom.settings import Workspace
from stillroom_mcp.next_steps import after_import_rollouts, after_list_machines
from stillroom_mcp.shell_steps import as_cli_commands, as_cli_step

ASKED = [{"role": "user", "content": "Two plus two?"}]
RIGHT = [{"role": "assistant", "content": "4"}]
WRONG = [{"role": "assistant", "content": "5"}]


@pytest.mark.parametrize(
    ("row", "step"),
    [
        (
            {
                "input": {"messages": ASKED},
                "preferred_output": RIGHT,
                "non_preferred_output": WRONG,
            },
            "make_dpo_pairs(input=out.jsonl)",
        ),
        ({"messages": ASKED, "output": RIGHT[0], "scores": {"ok": 1}}, "with reward_from"),
        ({"messages": ASKED, "output": RIGHT[0], "scores": {"reward": 1}}, "; then filter_dataset"),
    ],
    ids=["preferences", "scores without a reward", "rewards"],
)
def test_an_import_of_judged_answers_says_how_to_keep_the_wrong_ones_out(
    tmp_path, row: dict[str, object], step: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", "utf-8")
    request = api.ImportRollouts(input="rows.jsonl", output="out.jsonl")
    result = api.import_rollouts(Workspace(tmp_path), request)
    assert step in after_import_rollouts(request, result)


def test_an_import_of_prompts_says_how_to_evaluate_with_them(tmp_path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": ASKED + RIGHT}) + "\n", "utf-8")
    request = api.ImportRollouts(input="rows.jsonl", output="out.jsonl", prompts=True)
    result = api.import_rollouts(Workspace(tmp_path), request)
    step = "or evaluate_model(data=out.prompts.jsonl) if they are to evaluate with"
    assert after_import_rollouts(request, result).endswith(step)


@pytest.mark.parametrize(
    ("step", "command"),
    [
        ("get_run(run_id=sft-a, wait_s=110)", "stillroom get-run sft-a --wait-s 110"),
        (
            "import_rollouts(input=traces, output=app.jsonl, split_heldout=0.25, prompts=true)",
            "stillroom import-rollouts traces --output app.jsonl --split-heldout 0.25 --prompts",
        ),
        (
            "compare_evaluations(baseline=<run id>, candidates=[a, b])",
            "stillroom compare-evaluations <run id> --candidates a b",
        ),
        ("list_machines(check=true) asks them", "stillroom list-machines --check asks them"),
        ("filter_dataset, then convert_rollouts", None),
        ("give it a price_per_hour (budget_usd=5)", "give it a price_per_hour (--budget-usd 5)"),
        ("an evaluate_model run (tool list_runs)", "a stillroom evaluate-model run"),
        (
            "validate_dataset(path=out/plan_training.jsonl)",
            "stillroom validate-dataset out/plan_training.jsonl",
        ),
        (
            "override model.path=<run id>, or prompts=true",
            "override model.path=<run id>, or --prompts",
        ),
    ],
)
def test_as_cli_commands_a_step_is_a_command(step: str, command: str | None):
    expected = command or "stillroom filter-dataset, then stillroom convert-rollouts"
    assert as_cli_commands(step) == expected


def test_a_file_that_is_named_like_an_option_keeps_its_name():
    step = "convert_rollouts(input=kl_prompts.jsonl, output=min_reward/a.jsonl), then max_tokens."
    command = "stillroom convert-rollouts kl_prompts.jsonl --output min_reward/a.jsonl"
    assert as_cli_step(step) == f"{command}, then --max-tokens."


def test_no_next_step_or_fix_of_a_shell_names_a_tool_or_its_arguments():
    """Also where a step is in no test: all that are written out in the code."""
    steps = {text for name in ("next_steps", "outcomes") for text in texts_in(name)}
    assert len(steps) > 60
    fields = {name for operation in api.OPERATIONS for name in operation.request.model_fields}
    tools = {operation.name for operation in api.OPERATIONS}
    arguments = re.compile(r"(?<![\w.`-])([a-z]\w*)=")
    for text in map(as_cli_step, steps):
        assert not tools & set(re.findall(r"\w+", text)), text
        assert not fields & set(arguments.findall(text)), text
        assert not {name for name in fields if "_" in name} & set(re.findall(r"[\w.]+", text)), text
    for text in (as_cli_commands(message.fix) for message in messages()):
        assert not tools & set(re.findall(r"[\w.]+", text.replace("_example", ""))), text


def texts_in(module: str) -> set[str]:
    """Returns the texts of a module of the server, with … for what varies."""
    source = (ROOT / f"server/stillroom_mcp/{module}.py").read_text(encoding="utf-8")
    texts = set[str]()
    nodes = list(ast.walk(ast.parse(source)))
    parts_of = {
        id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values
    }
    for node in nodes:
        if id(node) in parts_of:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
            texts.add("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.add(node.value)
    # Docstrings say what is suggested; keys and parts of sentences have no spaces.
    return {
        text for text in texts if " " in text and "Suggests" not in text and "Returns" not in text
    }


def test_a_machine_that_the_user_rents_is_said_to_cost_until_they_stop_it(tmp_path):
    workspace = name_machines(tmp_path, "box: {ssh: me@host, price_per_hour: 2}\nown: {ssh: own}\n")
    request = api.ListMachines(check=True)
    open_machine = ScriptedMachines({"box": GPU_BOX, "own": GPU_BOX})

    step = after_list_machines(
        request, list_machines(workspace, request, open_machine=open_machine)
    )

    assert "tell the user that box costs money until they stop it" in step
