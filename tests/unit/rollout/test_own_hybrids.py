"""A whole run of rollouts by a hybrid model in this process."""

from functools import partial

from fakes.families import save_family
from fakes.reporters import KeptReporter
from fakes.rollout_rows import read_rows, write_rows
from fakes.waiting import run_async
from stillroom.rollout.request import GenerateRollouts
from stillroom.rollout.run import generate_rollouts
from stillroom.settings import Workspace

PROMPTS = [{"prompt": text, "metadata": {"expected_answer": 12}} for text in ("one", "two two")]


def test_a_model_that_is_sampled_in_a_slower_way_says_so_in_its_run(tmp_path):
    write_rows(tmp_path / "prompts.jsonl", PROMPTS)
    save_family(tmp_path, "jamba")
    reporter = KeptReporter()
    request = GenerateRollouts.model_validate({
        "input": "prompts.jsonl", "output": "out.jsonl", "model": "jamba-chatml-0",
        "provider": "hf", "max_tokens": 4, "concurrency": 2,
    })  # fmt: skip

    run_async(
        partial(
            generate_rollouts,
            Workspace(tmp_path),
            request,
            folder=tmp_path / "run",
            reporter=reporter,
        )
    )

    assert any("prompt tokens run one by one" in note for note in reporter.notes)
    rows = read_rows(tmp_path / "out.jsonl")
    assert len(rows) == len(PROMPTS)
