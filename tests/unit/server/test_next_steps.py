"""What a tool's result says comes next, where it depends on what the data is."""

import json

import pytest

from fakes.machines import GPU_BOX, ScriptedMachines, name_machines
from stillroom import api
from stillroom.remote.machine_list import list_machines
from stillroom.settings import Workspace
from stillroom_mcp.next_steps import after_import_rollouts, after_list_machines, as_cli_commands

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
        ("give it a price_per_hour (budget_usd=5)", "give it a price_per_hour (budget_usd=5)"),
    ],
)
def test_as_cli_commands_a_step_is_a_command(step: str, command: str | None):
    expected = command or "stillroom filter-dataset, then stillroom convert-rollouts"
    assert as_cli_commands(step) == expected


def test_a_machine_that_the_user_rents_is_said_to_cost_until_they_stop_it(tmp_path):
    workspace = name_machines(tmp_path, "box: {ssh: me@host, price_per_hour: 2}\nown: {ssh: own}\n")
    request = api.ListMachines(check=True)
    open_machine = ScriptedMachines({"box": GPU_BOX, "own": GPU_BOX})

    step = after_list_machines(
        request, list_machines(workspace, request, open_machine=open_machine)
    )

    assert "tell the user that box costs money until they stop it" in step
