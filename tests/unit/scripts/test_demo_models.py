import json
from dataclasses import asdict

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo_models.curriculum import ClerkMix, clerk_examples, echo_examples
from demo_models.other_student import OtherStudentSettings
from demo_models.pretrain import build_model, deepen, fit, shuffled_batches
from demo_models.recipe import RecipeSettings, TrainingPhase, build_models
from demo_models.tokenizer import train_tokenizer
from stillroom.demo import DEMO_MODELS
from stillroom.demo.world import is_heldout

MODELS = DEMO_MODELS["demo/student"].parent
TINY = RecipeSettings(
    num_tokenizer_tasks=50,
    echo=TrainingPhase(num_examples=20, num_steps=1, batch_size=4, seed=1),
    base=TrainingPhase(num_examples=20, num_steps=2, batch_size=4, seed=2),
    gold=TrainingPhase(num_examples=20, num_steps=2, batch_size=4, seed=3),
    num_heldout=10,
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(num_tasks=100, seed=0, vocabulary_size=640, max_length=512)


def test_the_shipped_models_are_complete_and_small():
    files = [path for path in MODELS.rglob("*") if path.is_file()]
    names = {path.relative_to(MODELS).as_posix() for path in files}
    folder_files = (
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    )

    assert names == {"RECIPE.json"} | {
        f"{model}/{name}"
        for model in ("student", "teacher", "other-student")
        for name in folder_files
    }
    assert sum(path.stat().st_size for path in files) <= 3_000_000


@pytest.mark.parametrize("name", DEMO_MODELS)
def test_a_shipped_model_loads_and_fits_its_tokenizer(name):
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODELS[name], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODELS[name])

    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert all(torch.isfinite(weights).all() for weights in model.parameters())


def test_the_record_is_of_the_recipe_as_it_stands():
    record = json.loads((MODELS / "RECIPE.json").read_text(encoding="utf-8"))

    assert record["settings"] == asdict(RecipeSettings())
    assert record["models"]["teacher"]["heldout"]["overall"] >= 0.95
    assert 0.2 <= record["models"]["student"]["heldout"]["overall"] <= 0.4
    other = record["other_student"]
    assert other["settings"] == asdict(OtherStudentSettings())
    assert 0.2 <= other["heldout"]["overall"] <= 0.4
    assert sum(other["bytes"].values()) <= 1_000_000


def test_the_recipe_gives_the_same_weights_again(tmp_path):
    for folder in ("once", "again"):
        build_models(tmp_path / folder, TINY)

    for model in ("student", "teacher"):
        once, again = (tmp_path / folder / model for folder in ("once", "again"))
        for path in once.iterdir():
            assert path.read_bytes() == (again / path.name).read_bytes()


def test_nothing_is_trained_on_held_out_texts(tokenizer):
    mix = ClerkMix(easy_share=0.5, gold_share={"easy": 0.5, "medium": 0.5, "hard": 0.5})
    for example in clerk_examples(tokenizer, 300, mix=mix, seed=0):
        prompt = tokenizer.decode(example.ids).split("<|im_start|>user\n")[1].split("<|im_end|>")[0]

        assert not is_heldout(prompt)


def test_an_echo_repeats_the_prompt(tokenizer):
    for example in echo_examples(tokenizer, 20, seed=0):
        text = tokenizer.decode(example.ids)
        prompt, reply = text.removeprefix("<|im_start|>user\n").split("<|im_end|>\n", 1)

        assert reply == f"<|im_start|>assistant\n{prompt}<|im_end|>\n"


def test_a_deepened_model_computes_the_same(tokenizer):
    model = build_model(tokenizer, num_layers=3, max_length=512, seed=0).eval()
    deeper = deepen(model, tokenizer, num_layers=5, seed=1).eval()
    ids = torch.randint(0, len(tokenizer), (2, 30), generator=torch.Generator().manual_seed(0))

    assert deeper.config.num_hidden_layers == 5
    assert torch.allclose(model(ids).logits, deeper(ids).logits, atol=1e-5)


def test_batches_are_full_and_cover_every_example(tokenizer):
    examples = echo_examples(tokenizer, 64, seed=0)
    batches = shuffled_batches(examples, batch_size=8, seed=0)
    first_round = [next(batches) for _ in range(8)]

    assert {len(batch) for batch in first_round} == {8}
    assert {id(example) for batch in first_round for example in batch} == set(map(id, examples))


def test_fitting_lowers_the_loss(tokenizer):
    examples = echo_examples(tokenizer, 16, seed=0)
    model = build_model(tokenizer, num_layers=1, max_length=512, seed=0)
    first, last = (
        fit(
            model,
            shuffled_batches(examples, batch_size=8, seed=0),
            num_steps=steps,
            peak_learning_rate=5e-3,
        )
        for steps in (1, 60)
    )

    assert last.steps == 60
    assert last.final_loss < first.final_loss
