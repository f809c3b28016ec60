"""What curation writes is trained by TRL as it is: its trainers, rows, tool schemas and masks."""

import json
from pathlib import Path
from typing import Any

import pytest

from fakes.rollout_lines import encoded
from fakes.rollout_rows import assistant, rollout_row, tool_call, tool_reply, user, write_lines
from stillroom.api import ConvertRollouts, MakeDpoPairs, convert_rollouts, make_dpo_pairs
from stillroom.settings import Workspace

pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("default")]


def schema(name: str, **properties: Any) -> dict:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


PRICE = schema("price", item={"type": "string", "default": None})
STOCK = schema("stock", shop={"anyOf": [{"type": "integer"}, {"type": "null"}]}, item={"enum": [1]})
TOOLS = [[PRICE], [PRICE, STOCK], [], [STOCK]]


def rollouts() -> list[dict]:
    """Two rollouts of each task; each task has tools and metadata of its own kind."""
    rows = []
    for number in range(16):
        call = tool_call(arguments='{"item": "lamp"}')
        talk = [user("price?"), assistant(None, call), tool_reply("7")]
        for sample, reward in enumerate((1.0, 0.0)):
            rows.append(
                rollout_row(
                    task_id=f"t{number}",
                    sample=sample,
                    reward=reward,
                    messages=[*talk, assistant(f"It is {7 + sample}.")],
                    tools=TOOLS[number % len(TOOLS)],
                    metadata=[{}, {"a": 1}, {"a": "x", "b": [1]}][number % 3],
                )
            )
    return rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_lines(tmp_path / "rollouts.jsonl", map(encoded, rollouts()))
    requested = ConvertRollouts(input="rollouts.jsonl", output="sft.jsonl", include_failed=True)
    convert_rollouts(Workspace(tmp_path), requested)
    make_dpo_pairs(Workspace(tmp_path), MakeDpoPairs(input="rollouts.jsonl", output="dpo.jsonl"))
    return tmp_path


def load(path: Path, **options: Any) -> Any:
    import datasets

    cache = str(path.with_suffix(".cache"))
    return datasets.load_dataset(
        "json", data_files=str(path), split="train", cache_dir=cache, **options
    )


def written(path: Path, field: str) -> list[str]:
    return [json.dumps(json.loads(line)[field]) for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize("name", ["sft.jsonl", "dpo.jsonl"])
def test_schemas_and_messages_come_out_of_datasets_as_they_were_written(
    folder: Path, name: str
) -> None:
    rows = load(folder / name)

    for field in {"tools", "messages", "prompt", "chosen", "metadata"} & set(rows.column_names):
        assert [json.dumps(value) for value in rows[field]] == written(folder / name, field)


def test_with_the_features_of_the_docs_rows_of_later_blocks_may_be_of_any_kind(
    folder: Path,
) -> None:
    from datasets import Features, Json, List, Value

    text, any_list = Value("string"), List(Json())
    features = Features(
        {
            "messages": any_list,
            "tools": any_list,
            "metadata": Json(),
            "reward": Value("float64"),
            "task_id": text,
            "rollout_id": text,
        }
    )

    rows = load(folder / "sft.jsonl", features=features, chunksize=500)

    for field in ("tools", "messages", "metadata"):
        assert [json.dumps(value) for value in rows[field]] == written(folder / "sft.jsonl", field)


def test_the_rows_train_in_the_trainer_for_supervised_rows(folder: Path, tiny_models: Any) -> None:
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(
        str(folder / "out"), max_steps=1, report_to=[], use_cpu=True, max_length=None, bf16=False
    )
    trainer = SFTTrainer(
        model=str(tiny_models.folder()), args=config, train_dataset=load(folder / "sft.jsonl")
    )

    decode = trainer.processing_class.decode
    texts = [decode(ids) for ids in trainer.train_dataset["input_ids"]]
    assert ["stock" in text for text in texts] == [
        "stock" in tools for tools in written(folder / "sft.jsonl", "tools")
    ]
    assert trainer.train().training_loss > 0


def test_the_pairs_train_in_the_trainer_for_preferences(folder: Path, tiny_models: Any) -> None:
    from trl import DPOConfig, DPOTrainer

    config = DPOConfig(
        str(folder / "out"), max_steps=1, report_to=[], use_cpu=True, max_length=None, bf16=False
    )
    trainer = DPOTrainer(
        model=str(tiny_models.folder()), args=config, train_dataset=load(folder / "dpo.jsonl")
    )

    assert len(trainer.train_dataset) == 16
    assert trainer.train().training_loss > 0
