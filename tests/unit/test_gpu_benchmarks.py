"""The benchmarks of a GPU run through on any machine, with tiny models and few tokens."""

import importlib
import json
import sys
from importlib.util import find_spec

import pytest

from fakes.source_tree import ROOT

# TRL is a peer in benchmarks and no dependency.
WHO = "ours,trl" if find_spec("trl") and find_spec("datasets") else "ours"


@pytest.fixture
def measured(monkeypatch, tmp_path, capsys):
    """Runs a script and returns the lines that it prints, the machine's first."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    # The script sets these for the libraries that it loads.
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
        monkeypatch.setenv(name, "1")
    for name in ("TRL_EXPERIMENTAL_SILENCE", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "")
    # Other scripts have modules of these names too.
    for name in ("shapes", "train", "generate"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def run(script, *arguments):
        importlib.import_module(script).main(["--tiny", *arguments])
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    yield run
    for name in ("shapes", "train", "generate"):
        sys.modules.pop(name, None)


def test_training_steps_of_all_methods_are_measured(measured):
    machine, *rows = measured("train", "--kinds", "lora", "--only", WHO)

    assert machine["is_tiny"]
    assert [row.get("error") for row in rows] == [None] * len(rows)
    ours = [(row["bench"], row["layout"]) for row in rows if row["who"] == "ours"]
    assert ours == [(work, "packed") for work in ("sft", "dpo", "opd")]
    assert all(row["tokens_per_s"] > 0 for row in rows)


def test_rows_are_run_in_the_way_that_is_asked_for(measured):
    _, *rows = measured(
        "train", "--works", "sft", "--kinds", "full", "--ways", "spans,padded", "--only", "ours"
    )

    assert [(row["way"], row["layout"]) for row in rows] == [
        ("spans", "packed"),
        ("padded", "padded"),
    ]
    assert rows[0]["losses"] == pytest.approx(rows[1]["losses"], abs=2e-3)


def test_all_weights_of_a_hybrid_are_trained(measured):
    [_, row] = measured(
        "train", "--sizes", "3.5-tiny", "--works", "sft", "--kinds", "full", "--only", "ours"
    )

    assert row["layout"] == "padded"
    assert len(row["losses"]) == 3


def test_sampling_is_measured_with_and_without_graphs_beside_transformers(measured):
    _, *rows = measured(
        "generate", "--sizes", "tiny,3.5-tiny", "--only", "ours,eager,dynamic", "--repeats", "1",
        "--works", "even",
    )  # fmt: skip

    assert len(rows) == 2 * 2 * 3
    assert all(row["tokens_per_s"] > 0 for row in rows)
