"""How a run is computed (packs, small passes, layers computed again) changes no loss."""

import pytest

from fakes.conversations import answer, user
from fakes.training import make_project

SFT_ROWS = [
    {"messages": [user(f"Item {i}?" * (1 + i % 5)), answer(f"It costs {i}.")]} for i in range(12)
]
DPO_ROWS = [
    {
        "prompt": [user(f"Which item is number {i} of the shop?")],
        "chosen": [answer(f"It is item {i}.")],
        "rejected": [answer("No.")],
    }
    for i in range(8)
]
ROWS = {"sft": SFT_ROWS, "dpo": DPO_ROWS}


def losses(root, method, folder, **model):
    root.mkdir()
    project = make_project(root, method, folder, trainer={"num_epochs": 2}, model=model)
    project.write(ROWS[method])
    project.train()
    return [metrics["loss"] for metrics in project.reporter.measured]


@pytest.mark.parametrize(("method", "rank"), [("sft", 0), ("dpo", 4)])
@pytest.mark.parametrize(
    "option",
    [{"microbatch_tokens": 1}, {"gradient_checkpointing": True}],
    ids=["row by row", "computed again"],
)
def test_the_losses_of_a_run_stay(tmp_path, tiny_models, method, rank, option):
    folder = tiny_models.folder("qwen3", "chatml")

    usual = losses(tmp_path / "usual", method, folder, qlora_rank=rank)
    found = losses(tmp_path / "other", method, folder, qlora_rank=rank, **option)

    assert found == pytest.approx(usual, abs=2e-5)
    assert max(usual) - min(usual) > 1e-3


@pytest.mark.parametrize("method", ROWS)
def test_packed_rows_have_the_losses_of_padded_ones(tmp_path, tiny_models, monkeypatch, method):
    folder = tiny_models.folder("qwen3", "chatml")
    packed = losses(tmp_path / "packed", method, folder)

    monkeypatch.setattr("stillroom.train.student.model.choose_passes", lambda _head, **_: None)
    padded = losses(tmp_path / "padded", method, folder)

    assert packed == pytest.approx(padded, abs=2e-5)
    assert packed != padded
