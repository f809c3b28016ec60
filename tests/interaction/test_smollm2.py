"""A real model goes the whole way: masks, a training step, sampling, a GGUF file in llama.cpp."""

import json

import anyio
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fakes.conversations import answer, user
from fakes.decoding import decode_all, generated, sequence_of
from fakes.reporters import KeptReporter
from fakes.smollm2 import smollm2_folder
from fakes.training import make_project
from stillroom.data.chat.render import ChatRenderer
from stillroom.data.chat.template import template_file
from stillroom.evaluate.request import EvaluateModel
from stillroom.evaluate.run import evaluate_model
from stillroom.export.request import ExportModel
from stillroom.export.run import export_model
from stillroom.files import write_json
from stillroom.models.batches import TokenSequence
from stillroom.models.load import load_model
from stillroom.models.reread.pair_check import open_pair
from stillroom.models.resolve import ModelLocation
from stillroom.settings import Workspace
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.train.config.sections import ModelSection
from stillroom.train.on_policy.training_sequences import TrainingSequence
from stillroom.train.planning.model_checks import divergence_note, end_token_notes, prompt_note
from stillroom.train.student.model import load_student
from stillroom.types import SamplingSettings

# At each of the first 16 tokens of its answers the model is sure of the next one.
SURE = [
    "What is the capital of Germany?",
    "How many days are in a week?",
    "What is the boiling point of water in Celsius?",
    "What language is spoken in Spain?",
    "Count from 1 to 10.",
]
ROWS = [
    [user("What does the lamp cost in 2024?"), answer("It costs 1,234.50 €.")],
    [user("Hi!"), answer("Hello."), user("And the red chair?"), answer("The chair\n\ncosts 7.")],
    [{"role": "system", "content": "Be brief."}, user("Which queue?"), answer("billing")],
    [user("Was kostet ein Tisch? 🙂"), answer("Ein Tisch kostet 30 Euro, größere mehr.")],
]
REWARDS = """
from stillroom.tools import RewardArgs, reward

@reward()
def says_something(args: RewardArgs, messages: list) -> float:
    return float(bool(messages[-1]["content"].strip()))
"""


@pytest.fixture(scope="session")
def smollm2():
    return smollm2_folder()


def ids_and_labels(tokenizer, messages):
    """Returns a row's tokens, and those to learn (-100 elsewhere) by the template's prefixes."""

    def ids_of(part, **options):
        return tokenizer.apply_chat_template(part, return_dict=False, **options)

    ids = ids_of(messages)
    labels = [-100] * len(ids)
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            start = len(ids_of(messages[:i], add_generation_prompt=True))
            # The line end after the end of the turn is the template's.
            end = len(ids_of(messages[: i + 1])) - 1
            labels[start:end] = ids[start:end]
    return ids, labels


def test_only_answers_and_their_ends_are_trained(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    for messages in ROWS:
        [row] = ChatRenderer(tokenizer).sequences(messages, [])
        ids, labels = ids_and_labels(tokenizer, messages)
        # Nothing after the last end of turn is needed.
        assert row.ids == ids[: len(row.ids)]
        assert set(labels[len(row.ids) :]) <= {-100}
        trained = [i if kept else -100 for i, kept in zip(row.ids, row.trained, strict=True)]
        assert trained == labels[: len(row.ids)]
        said = [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
        assert tokenizer.decode([i for i in trained if i != -100]) == "".join(said)


def test_greedy_tokens_are_those_of_generate(smollm2):
    location = ModelLocation("smollm2", str(smollm2), is_local=True)
    loaded = load_model(Workspace(smollm2.parent), location)
    renderer = ChatRenderer(loaded.tokenizer)
    prompts = [renderer.prompt_ids([user(question)], []) for question in SURE]
    settings = SamplingSettings(temperature=0.0, max_tokens=16)
    found = decode_all(loaded, [sequence_of(prompt, settings) for prompt in prompts])
    assert found == [generated(loaded, prompt, max_tokens=16) for prompt in prompts]


@torch.no_grad()
def cross_entropy(folder):
    """Returns transformers' own loss of the rows in one padded batch."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [ids_and_labels(tokenizer, messages) for messages in ROWS]
    longest = max(len(ids) for ids, _ in rows)
    ids_BT, mask_BT, labels_BT = (
        torch.tensor([row + [fill] * (longest - len(row)) for row in column])
        for column, fill in (
            ([ids for ids, _ in rows], 0),
            ([[1] * len(ids) for ids, _ in rows], 0),
            ([labels for _, labels in rows], -100),
        )
    )
    return model(ids_BT, attention_mask=mask_BT, labels=labels_BT).loss.item()


def test_the_loss_of_a_step_is_transformers_cross_entropy(smollm2, tmp_path):
    trainer = {"learning_rate": 1e-5}
    project = make_project(tmp_path, "sft", smollm2, model={"qlora_rank": 8}, trainer=trainer)
    project.write([{"messages": messages} for messages in ROWS])
    project.train()
    [step] = project.reporter.measured
    assert step["loss"] == pytest.approx(cross_entropy(smollm2), abs=1e-5)


def test_a_plan_says_what_a_teacher_can_teach_it(smollm2):
    student = load_student(Workspace(smollm2.parent), ModelSection(path=str(smollm2)), seed=0)
    rows = [ChatRenderer(student.loaded.tokenizer).conversation(row, []) for row in ROWS]
    sequences = [TokenSequence(row.ids, row.trained) for row in rows]
    answers = [TrainingSequence(row, [-1.0] * row.num_trained) for row in sequences]
    teacher = LocalTeacher(load_model(Workspace(smollm2.parent), student.loaded.location))
    assert "this teacher will teach little" in divergence_note(student, teacher, answers)
    [note] = end_token_notes(student, sequences, teacher)
    assert "its soft targets would teach the student to continue there" in note
    own = [user("What is the capital of Germany?"), answer("The capital of Germany is Berlin.")]
    [row] = ChatRenderer(student.loaded.tokenizer).sequences(own, [])
    assert end_token_notes(student, [TokenSequence(row.ids, row.trained)], teacher) == []

    student.loaded.tokenizer.chat_template = template_file("chatml").read_text("utf-8")
    pair = open_pair(student.loaded, teacher.loaded)
    assert pair is not None
    note = prompt_note(pair, ROWS[0][:1])
    assert note is not None
    assert "You are a helpful AI assistant named SmolLM" in note
    assert prompt_note(pair, ROWS[2][:2]) is None

    with torch.no_grad():
        for layer in teacher.loaded.model.base_model.layers[-8:]:
            layer.mlp.down_proj.weight.zero_()
    assert "learns slowly" in divergence_note(student, teacher, answers)


def test_its_gguf_file_answers_in_llama_cpp_as_the_model(smollm2, tmp_path, monkeypatch):
    pytest.importorskip("xllamacpp", reason="the extra gguf is not installed")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    workspace = Workspace(tmp_path)
    folder = workspace.runs / "evaluate-1"
    folder.mkdir(parents=True)
    rows = [json.dumps({"prompt": question}) for question in SURE]
    (tmp_path / "heldout.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (tmp_path / "rewards.py").write_text(REWARDS, encoding="utf-8")
    request = EvaluateModel(
        model=str(smollm2), data="heldout.jsonl", rewards="rewards.py", max_tokens=16
    )
    document = {"kind": "evaluate", "workspace": str(tmp_path), "request": request.model_dump()}
    write_json(folder / "request.json", document)

    async def evaluate():
        await evaluate_model(workspace, request, folder=folder, reporter=KeptReporter())

    anyio.run(evaluate)
    export = ExportModel(
        model=str(smollm2), output="clerk", format="gguf", precision="fp16", verify=len(SURE)
    )
    folder = workspace.runs / "export-1"
    folder.mkdir()
    result = export_model(workspace, export, folder=folder, reporter=KeptReporter())
    (verified,) = result.verified
    assert (result.precision, verified.served_by) == ("fp16", "llama.cpp")
    assert (verified.tasks, verified.accuracy, verified.same_answers) == (len(SURE), 1.0, 1.0)
    # Two bytes for each of 135 million weights, as the head is the embeddings.
    assert 265e6 < result.bytes < 275e6
    answers = (workspace.runs / "evaluate-1" / "rollouts.jsonl").read_text("utf-8").splitlines()
    assert any("Berlin" in json.loads(line)["messages"][-1]["content"] for line in answers)
