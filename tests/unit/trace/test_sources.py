"""All rows behind a model, written for an auditor."""

import json
import shutil
from collections import Counter
from typing import Any

import pytest

from fakes.lineages import NUM_PROMPTS, RUN, Lineages
from fakes.rollout_rows import read_rows, write_rows
from stillroom.errors import InputError
from stillroom.lineage import FOLDER_MANIFEST
from stillroom.trace.request import Lineage, ShowLineage
from stillroom.trace.show import show_lineage


def written(project: Lineages, path: str) -> tuple[Lineage, list[dict[str, Any]]]:
    request = ShowLineage(path=path, sources="audit.jsonl")
    return show_lineage(project.workspace, request), read_rows(project.root / "audit.jsonl")


def files_of(rows: list[dict[str, Any]]) -> dict[str, int]:
    return dict(Counter(row["at"].partition(":")[0] for row in rows))


def test_a_checkpoint_and_its_export_lead_to_every_row_that_was_used(project: Lineages) -> None:
    project.export()
    for path in (RUN, "exported"):
        lineage, rows = written(project, path)

        names = ("sft.jsonl", "good.jsonl", "rollouts.jsonl", "prompts.jsonl")
        assert files_of(rows) == dict.fromkeys(names, NUM_PROMPTS)
        assert (lineage.sources, lineage.num_sources) == ("audit.jsonl", 4 * NUM_PROMPTS)
        # Each row is as it stands in its file, and the wrong rollouts were not used.
        for row in rows:
            name, _, number = row["at"].partition(":")
            line = (project.root / name).read_text(encoding="utf-8").splitlines()[int(number) - 1]
            assert row["content"] == json.loads(line)
            assert row["state"] == "same"
        used = [row["content"]["id"] for row in rows if row["at"].startswith("rollouts")]
        assert used == project.ids[::2]


def test_a_model_trained_twice_leads_to_the_rows_of_both_trainings(project: Lineages) -> None:
    first = project.root / "first"
    (project.root / "runs" / RUN / "checkpoints" / "final").rename(first)
    manifest = json.loads((first / FOLDER_MANIFEST).read_text("utf-8"))
    manifest["output"]["path"] = str(first)
    (first / FOLDER_MANIFEST).write_text(json.dumps(manifest), "utf-8")
    shutil.rmtree(project.root / "runs")
    write_rows(project.root / "more.jsonl", [{"prompt": "One more?"}])
    project.checkpoint("more.jsonl", base=first)
    project.export()

    files = files_of(written(project, "exported")[1])

    names = ("sft.jsonl", "good.jsonl", "rollouts.jsonl", "prompts.jsonl")
    assert files == {"more.jsonl": 1, **dict.fromkeys(names, NUM_PROMPTS)}


def test_pairs_lead_to_both_rollouts_and_old_ones_by_their_ids(project: Lineages) -> None:
    project.pairs()
    expected = {"pairs.jsonl": 4, "rollouts.jsonl": 8, "prompts.jsonl": 4}
    assert files_of(written(project, "pairs.jsonl")[1]) == expected

    pairs = [
        {**pair, "chosen_id": project.ids[2 * n], "rejected_id": project.ids[2 * n + 1]}
        for n, pair in enumerate(project.rows("pairs.jsonl"))
    ]
    write_rows(project.root / "pairs.jsonl", pairs)
    assert files_of(written(project, "pairs.jsonl")[1])["rollouts.jsonl"] == 8


def test_the_file_never_replaces_an_input_or_a_file_of_others(project: Lineages) -> None:
    for name in ("sft.jsonl", "config.yml"):
        with pytest.raises(InputError):
            show_lineage(project.workspace, ShowLineage(path=RUN, sources=name))
