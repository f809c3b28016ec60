"""kill -9 at random moments in a whole recipe: does it end with the same result, and pay nothing twice?

    kill_recipe.py [--kills 50] [--seed 0]

A recipe is started and killed at a random moment, alone or with the run of its present stage, and
started again with the same request until it ends. Then the next one begins in another folder, until
all kills are done. Each must end with the accuracies, counts and weights of one that nobody killed.
A call whose reply was on its way at a kill may be made again; others may not. Prints a JSON line.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from scenes import wait_for_end

from fakes.colours import ColourTeacher, make_data
from fakes.tiny_models import TinyModels
from stillroom import api
from stillroom.run_folder import all_runs
from stillroom.settings import Workspace

MAX_WAIT_S = 900.0
MAX_STARTS = 60
"""Of one recipe; what is not whole by then counts as lost."""
CONCURRENCY = 20
"""The calls that may be on their way at a kill: the default of generate_rollouts."""


def start(workspace: Workspace, teacher: ColourTeacher, student: Path) -> str:
    request = api.RunRecipe(
        input="inputs.csv",
        labelled="labelled.csv",
        teacher="t",
        base_url=teacher.base_url,
        student=str(student),
        system="Name the colour.",
        budget_usd=1.0,
        accept=("gain",),
    )
    return api.run_recipe(workspace, request).run_id


def outcome(workspace: Workspace, result: dict[str, Any]) -> dict[str, Any]:
    """What must be the same however often a recipe was killed."""
    weights = (workspace.root / result["folder"] / "model.safetensors").read_bytes()
    accuracy = [[one["name"], one["prompts"], one["accuracy"]] for one in result["accuracy"]]
    return {
        "weights": hashlib.sha256(weights).hexdigest(),
        "accuracy": accuracy,
        "answers": result["answers"],
    }


def kill(workspace: Workspace, run_id: str, *, with_stage: bool) -> None:
    """Kills a recipe's process, and with `with_stage` those of all other runs."""
    for folder in all_runs(workspace):
        state = folder.read()
        if state.pid is None or state.status.is_final:
            continue
        if folder.run_id == run_id or with_stage:
            with suppress(ProcessLookupError):
                os.kill(state.pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["OPENAI_API_KEY"] = "key"
    rng, figures = random.Random(options.seed), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="kill-recipe-") as name, ColourTeacher() as teacher:
        root = Path(name)
        student = TinyModels(root / "models").folder("llama", "chatml")
        (root / "whole").mkdir()
        whole = make_data(root / "whole")
        begun = time.monotonic()
        ended = wait_for_end(whole, start(whole, teacher, student), MAX_WAIT_S)
        took_s = time.monotonic() - begun
        assert ended.result is not None, ended.error
        expected, calls = outcome(whole, ended.result), teacher.num_calls
        while figures["kills"] < options.kills:
            folder = root / f"killed-{figures['recipes']}"
            folder.mkdir()
            workspace, before = make_data(folder), teacher.num_calls
            figures["recipes"] += 1
            for _ in range(MAX_STARTS):
                run_id = start(workspace, teacher, student)
                if figures["kills"] < options.kills:
                    time.sleep(rng.uniform(0, took_s / 2))
                    kill(workspace, run_id, with_stage=rng.random() < 0.5)
                    figures["kills"] += 1
                ended = wait_for_end(workspace, run_id, MAX_WAIT_S)
                if ended.status == "succeeded":
                    break
            is_same = ended.result is not None and outcome(workspace, ended.result) == expected
            figures["same"] += is_same
            figures["calls again"] += teacher.num_calls - before - calls
    figures["most calls again"] = CONCURRENCY * options.kills
    print(json.dumps({"seconds": round(took_s, 1), "calls": calls, **figures}))
    is_paid_once = figures["calls again"] <= figures["most calls again"]
    sys.exit(figures["same"] != figures["recipes"] or not is_paid_once)


if __name__ == "__main__":
    main()
