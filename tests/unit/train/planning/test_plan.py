"""plan_training against what the runs that follow it come to."""

import json
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM

from fakes.conversations import LAMP, answer, calls, reply, user
from fakes.families import build_family
from fakes.started_runs import ended, start
from fakes.training import make_project
from stillroom import api
from stillroom.errors import DataError, ModelError
from stillroom.policy.passes import SlotPasses
from stillroom.policy.slot_cache import new_slot_cache
from stillroom.train.config.file import load_config
from stillroom.train.config.request import PlanTraining
from stillroom.train.config.schema import CONFIGS
from stillroom.train.planning import forecast
from stillroom.train.planning.forecast import ModelSize, describe_learning, describe_steps
from stillroom.train.planning.plan import plan_training
from stillroom.train.planning.weightless_models import sampling_bytes, size_of

ROWS = [{"messages": [user(f"Item {i}?"), answer(f"It costs {i}. " * 8)]} for i in range(12)]
PAIRS = [
    {
        "prompt": [user(f"Item {i}?")],
        "chosen": [answer(f"It costs {i}.")],
        "rejected": [answer("No.")],
    }
    for i in range(6)
]
LARGE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}


def project_of(root, start, method="sft", rows=ROWS, **sections):
    project = make_project(root, method, start, **sections)
    project.write(rows)
    project.write_config()
    return project


def plan(project, *overrides):
    return plan_training(project.workspace, PlanTraining(overrides=overrides))


def steps_s(reported):
    """The time of the steps alone."""
    assert reported.start_s > 0
    return reported.seconds - reported.start_s


@pytest.mark.parametrize(
    ("rank", "rate", "millions", "method", "said"),
    [
        (32, 1e-4, 50, "sft", "model.qlora_rank=0 trains all weights"),
        (0, 3e-3, 50, "sft", None),
        (0, 1e-4, 600, "sft", "which suits adapters: trainer.learning_rate=1e-5"),
        (0, 1e-5, 600, "sft", None),
        (32, 1e-5, 600, "sft", "which suits full fine-tuning: trainer.learning_rate=1e-4"),
        (32, 5e-6, 600, "dpo", None),
        (32, 1e-4, 600, "sft", None),
        (32, 1e-4, 135, "sft", "model.qlora_rank=0 and trainer.learning_rate=2e-04"),
        (32, 1e-3, 135, "sft", None),
        (32, 1e-5, 135, "dpo", None),
        (0, 2e-4, 135, "sft", None),
    ],
)
def test_a_plan_tells_of_a_learning_rate_or_an_adapter_that_does_not_suit_the_model(
    rank, rate, millions, method, said
):
    config = CONFIGS[method].model_validate(
        {
            "dataset_type": method,
            "data": {"train_file": "rows.jsonl", "batch_size": 8},
            "model": {"path": "m", "qlora_rank": rank},
            "trainer": {"num_epochs": 1, "learning_rate": rate},
        }
    )

    notes = describe_learning(config, millions * 1_000_000)

    assert len(notes) == (said is not None)
    assert said is None or said in notes[0]


@pytest.mark.parametrize(
    ("method", "steps", "trainer", "said"),
    [
        ("sft", 16, {}, "only 16 optimiser steps"),
        ("sft", 200, {}, None),
        ("distill", 40, {"max_steps": 40}, None),
        ("distill", 8, {"max_steps": 8}, "for about 100, raise trainer.max_steps"),
        ("distill", 60, {"max_steps": 100}, "fewer than trainer.max_steps 100: raise trainer"),
    ],
)
def test_a_plan_tells_of_too_few_steps(method, steps, trainer, said):
    config = CONFIGS[method].model_validate(
        {
            "dataset_type": method,
            "data": {"batch_size": 8},
            "model": {"path": "m"},
            "trainer": {"num_epochs": 2, **trainer},
            **({"teacher": {"path": "t"}} if method == "distill" else {}),
        }
    )

    notes = describe_steps(config, steps)

    assert len(notes) == (said is not None)
    assert said is None or said in notes[0]


@pytest.mark.parametrize(("method", "size"), [("sft", 8), ("dpo", 8), ("distill", 32)])
def test_a_plan_explains_the_batch_size_that_nobody_set(method, size):
    document = {
        "dataset_type": method,
        "data": {},
        "model": {"path": "m"},
        **({"teacher": {"path": "t"}} if method == "distill" else {}),
    }
    notes = describe_steps(CONFIGS[method].model_validate(document), 1000)

    assert [note.partition(",")[0] for note in notes] == [f"data.batch_size is {size}"]


def ran(project) -> api.RunReport:
    report = ended(project, start(project))
    assert report.status == "succeeded", report.error
    return report


def size_on_disk(folder) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.mark.usefixtures("warm_python")
def test_the_forecast_of_a_run_is_what_the_run_comes_to(tmp_path, tiny_models):
    start = tiny_models.folder("llama", "chatml", **LARGE)
    project = project_of(tmp_path, start, trainer={"save_step": 1, "keep_checkpoints": 1})

    progress = []
    with api.report_progress_to(progress.append):
        reported = api.plan_training(project.workspace, api.PlanTraining())
    report = ran(project)

    assert report.result is not None
    assert reported.steps == report.result["steps"] == 3
    # Said before anything is tried, which may take minutes on a busy machine.
    [estimate] = progress
    assert estimate.startswith(f"3 steps on cpu, at most {reported.memory_gb:.1f} GB of memory")
    assert "two steps are tried now" in estimate
    assert reported.rows == report.result["rows"] == 12
    measured = report.metrics["memory_gb"]
    process = reported.memory_parts_gb["process"]
    # What the model takes: weights that are all trained need four times their size.
    assert reported.memory_gb - process > 4 * reported.memory_parts_gb["weights"]
    # What libraries and the allocator hold beside it differs from process to process.
    assert reported.memory_gb == pytest.approx(measured, rel=0.3)
    assert reported.measured_memory_gb == pytest.approx(measured, rel=0.3)
    checkpoints = project.root / "runs" / report.run_id / "checkpoints"
    step = size_on_disk(checkpoints / "step_000002")
    assert reported.checkpoint_gb * 1e9 == pytest.approx(step, rel=0.1)
    # Two of them stand there while the second is written.
    assert reported.disk_gb * 1e9 == pytest.approx(size_on_disk(checkpoints) + step, rel=0.15)
    assert reported.fits
    assert reported.changes == []
    assert reported.seconds is not None
    assert reported.start_s is not None
    assert 0 < reported.start_s < reported.seconds
    # Both count the tokens that are trained on, and no loading.
    assert reported.tokens_per_s is not None
    trained = report.result["trained_tokens"]
    assert trained / reported.tokens_per_s == pytest.approx(steps_s(reported), rel=1e-6)
    steps_took_s = report.result["seconds"] - trained / report.metrics["tokens_per_s"]
    assert 0 < steps_took_s < report.result["seconds"]


def test_a_plan_of_pairs_counts_both_sides(tmp_path, tiny_models):
    project = project_of(tmp_path, tiny_models.folder("llama", "chatml"), "dpo", PAIRS)

    reported = plan(project)

    result = project.train()
    assert (reported.rows, reported.steps) == (result.rows, result.steps) == (6, 2)
    assert reported.epoch_tokens is not None
    assert reported.epoch_tokens > result.trained_tokens
    assert reported.epoch_trained_tokens == result.trained_tokens


def test_a_plan_of_distillation_has_the_teacher_and_the_time_of_a_short_iteration(
    tmp_path, tiny_models
):
    start = tiny_models.folder("llama", "clerk")
    project = project_of(
        tmp_path,
        start,
        "distill",
        [{"prompt": f"Item {i}?"} for i in range(6)],
        teacher={"path": str(tiny_models.folder("llama", "clerk", seed=1))},
        data={"batch_size": 4, "group_size": 2},
        rollout={"max_tokens": 12},
        trainer={"num_epochs": 2},
    )

    reported = plan(project)

    assert (reported.rows, reported.steps, reported.epoch_tokens) == (6, 3, None)
    assert reported.tokens_per_s is not None
    assert reported.measured_memory_gb is not None
    # Three iterations of eight rollouts; a clerk's turn is a phrase and its end.
    assert steps_s(reported) == pytest.approx(3 * 8 * 2 / reported.tokens_per_s)
    assert "one turn per rollout of 2 tokens (as in a short trial)" in reported.notes[-1]
    parts = reported.memory_parts_gb
    assert parts["teacher"] == parts["weights"] > 0
    assert parts["sampling"] > 0
    # Not as if each rollout used rollout.max_tokens and a prompt of 512 tokens.
    assert "memory is for rollouts of" in reported.notes[-2]
    most = float(reported.notes[-2].split()[-2])
    assert reported.memory_gb < most
    assert "trainer.max_steps=2" in " ".join(reported.notes)


def test_a_plan_names_the_checkpoint_that_it_is_for_and_what_its_memory_assumes(
    tmp_path, tiny_models
):
    project = project_of(tmp_path, tiny_models.folder("llama", "chatml"))
    project.train()
    project.write([{"prompt": "Item?"}], name="prompts.jsonl")

    teacher = str(tiny_models.folder("llama", "chatml", seed=1))
    project.config = {
        "dataset_type": "distill",
        "data": {"train_file": "prompts.jsonl", "batch_size": 1},
        "model": {"path": "run-1", "qlora_rank": 0},
        "teacher": {"path": teacher},
        "rollout": {"max_turns": 3, "max_tokens": 8},
    }
    project.write_config()
    notes = plan(project).notes

    assert "the student is runs/run-1/checkpoints/final" in notes
    [memory] = [note for note in notes if "largest forward pass" in note]
    assert "as if each of a rollout's 3 turns had rollout.max_tokens (8)" in memory


def test_answers_longer_than_the_trial_count_as_long_as_they_may_get(tmp_path, tiny_models):
    start = tiny_models.folder("llama", "chatml")
    project = project_of(
        tmp_path,
        start,
        "distill",
        [{"prompt": f"Item {i}?"} for i in range(4)],
        teacher={"path": str(start)},
        data={"batch_size": 4, "group_size": 4},
        rollout={"max_tokens": 100},
    )

    reported = plan_training(project.workspace, PlanTraining(), started=time.monotonic() - 1000)

    assert reported.tokens_per_s is not None
    assert steps_s(reported) == pytest.approx(16 * 100 / reported.tokens_per_s)
    # The time that imports took counts, as a run takes it too.
    assert reported.start_s is not None
    assert reported.start_s > 1000
    assert "of 100 tokens (the maximum)" in reported.notes[-1]


def test_four_bits_take_an_eighth_of_what_the_matrices_took(tiny_models):
    model = AutoModelForCausalLM.from_pretrained(tiny_models.folder("llama", "chatml"))
    matrices = sum(p.numel() for n, p in model.named_parameters() if "_proj" in n or "mlp" in n)
    model.requires_grad_(False)

    whole, small = size_of(model.to("meta")), size_of(model.to("meta"), is_quantized=True)

    assert whole.weight_bytes - small.weight_bytes == pytest.approx(matrices * 3.4375, rel=1e-3)


def test_a_pair_of_models_that_read_tokens_differently_is_refused(tmp_path, tiny_models):
    project = project_of(
        tmp_path,
        tiny_models.folder("llama", "clerk"),
        "distill",
        [{"prompt": "a"}],
        teacher={"path": str(tiny_models.folder("llama", "chatml"))},
    )

    with pytest.raises(ModelError, match="different tokenizers"):
        plan(project)


def test_a_bad_row_anywhere_ends_the_plan(tmp_path, tiny_models):
    project = project_of(tmp_path, tiny_models.folder("llama", "chatml"), rows=ROWS * 100)
    file = tmp_path / "train.jsonl"
    file.write_text(file.read_text(encoding="utf-8") + '{"messages": []}\n', encoding="utf-8")

    with pytest.raises(DataError, match=r"train\.jsonl:1201: "):
        plan(project)


def config_of(tmp_path, *overrides):
    path = tmp_path / "config.json"
    sections = {
        "dataset_type": "sft",
        "data": {"batch_size": 4},
        "model": {"path": "m"},
        "trainer": {"num_epochs": 2},
    }
    path.write_text(json.dumps(sections), encoding="utf-8")
    return load_config(path, overrides)


SIZE = ModelSize(
    weight_bytes=4000,
    num_parameters=1000,
    trained_bytes=400,
    num_trained=100,
    activation_bytes=50,
    vocab_size=10,
    tile_positions=8,
)


def test_memory_is_the_sum_of_its_parts_by_hand():
    parts = forecast.memory_parts(SIZE, tokens=20, process_bytes=7)

    assert parts == {
        "process": 7,
        "weights": 4000,
        "gradients": 400,
        "optimizer": 800,
        "activations": 1000,
        "head": 2 * 8 * 10 * 4,
    }


@pytest.mark.parametrize(
    ("overrides", "num_checkpoints"),
    [
        ([], 0),
        (["trainer.save_step=2"], 4),
        (["trainer.save_step=5"], 1),
        (["trainer.save_step=10"], 0),
        (["trainer.save_step=2", "trainer.keep_checkpoints=2"], 3),
        (["trainer.save_step=2", "trainer.keep_checkpoints=9"], 4),
    ],
)
def test_disk_is_for_the_checkpoints_that_stay(tmp_path, overrides, num_checkpoints):
    needed = forecast.disk_bytes(config_of(tmp_path, *overrides), SIZE, steps=10)

    assert needed == num_checkpoints * 1200 + 400


@pytest.mark.parametrize(("method", "reference_s"), [("sft", 0), ("dpo", 15)])
def test_time_is_that_of_tokens_and_steps(tmp_path, method, reference_s):
    config = config_of(tmp_path, f"dataset_type={method}")
    speed = forecast.Speed(token_s=0.5, step_s=3)

    seconds = forecast.run_seconds(config, speed, steps=10, epoch_tokens=60, held_out_share=0.5)

    # Two epochs of 30 s, a third of half an epoch for each validation, and ten steps of 3 s.
    # DPO's reference scores one and a half epochs, in a third of their time.
    assert seconds == pytest.approx(60 + 10 + 30 + reference_s)


def test_what_does_not_fit_comes_with_what_would():
    needs = {"model.max_length=100": 5e9, "model.qlora_rank=32": 2e9}

    assert forecast.describe_settings(needs, 10e9) == [
        "model.max_length=100 needs 5.00 GB",
        "model.qlora_rank=32 needs 2.00 GB",
    ]
    assert forecast.describe_settings(needs, 3e9) == ["model.qlora_rank=32 needs 2.00 GB"]
    (only,) = forecast.describe_settings(needs, 1e9)
    assert only == (
        "model.qlora_rank=32 needs 2.00 GB, which is still too much: use a smaller model"
    )
    assert not forecast.fits(9.5e9, 10e9)


def test_a_model_far_too_large_is_told_without_loading_it(tmp_path, tiny_models):
    # Without weights: only what the configuration says is read.
    start = tiny_models.folder("llama", "chatml")
    large = tmp_path / "large"
    large.mkdir()
    for file in start.iterdir():
        if file.suffix != ".safetensors":
            (large / file.name).write_bytes(file.read_bytes())
    config = json.loads((large / "config.json").read_text(encoding="utf-8"))
    config |= {"hidden_size": 65536, "intermediate_size": 262144, "num_hidden_layers": 5}
    (large / "config.json").write_text(json.dumps(config), encoding="utf-8")

    reported = plan(project_of(tmp_path, large))

    assert not reported.fits
    assert reported.parameters > 2.5e11
    assert reported.measured_memory_gb is None
    assert reported.changes
    assert "model.qlora_rank=32" in reported.changes[0]
    assert "still too much: use a smaller model" in reported.changes[0]


def test_smaller_passes_and_layers_computed_again_need_less(tmp_path, tiny_models):
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
    project = project_of(tmp_path, tiny_models.folder("llama", "chatml", **sizes))

    def activations(*overrides):
        return plan(project, *overrides).memory_parts_gb["activations"]

    plain = plan(project)
    whole = plain.memory_parts_gb["activations"]
    small = activations(f"model.microbatch_tokens={plain.longest_tokens}")
    assert small == pytest.approx(whole / 4, rel=0.1)
    assert activations("model.gradient_checkpointing=true") < 0.35 * whole


@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3.5", "mamba2"])
def test_activations_of_experts_and_recurrent_layers_are_forecast(family):
    """They are counted on tensors without numbers: what a pass on real ones keeps is the same."""
    kept = [0]

    def keep(tensor):
        kept[-1] += tensor.nbytes
        return tensor

    model = build_family(family, max_position_embeddings=1024)
    body = model.get_decoder()
    for num_tokens in (256, 512):
        kept.append(0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            body(input_ids=torch.zeros(1, num_tokens, dtype=torch.int64), use_cache=False)
    with torch.device("meta"):
        empty = build_family(family)

    forecast_bytes = size_of(empty).activation_bytes

    measured = (kept[-1] - kept[-2]) / 256
    assert 0.3 * measured < forecast_bytes < 1.2 * measured


@pytest.mark.parametrize("family", ["qwen3.5", "falcon-h1", "mamba2", "deepseek-v3", "gemma4"])
def test_what_sampling_keeps_is_forecast_with_the_states_of_recurrent_layers(family):
    model = build_family(family)
    cache = new_slot_cache(model.config, num_slots=1)
    with torch.no_grad():
        SlotPasses(model, cache).logits([0], [0], [[5] * 128])
    kept = [tensor for layer in cache.layers for tensor in _tensors_of(layer)]

    assert sampling_bytes(model.to("meta"), num_tokens=128) == sum(t.nbytes for t in kept)


def _tensors_of(layer) -> list[torch.Tensor]:
    pair = [getattr(layer, name, None) for name in ("keys", "values")]
    kinds = [getattr(layer, name, {}) for name in ("conv_states", "recurrent_states")]
    states = [state for kind in kinds for state in kind.values()]
    return [tensor for tensor in (*pair, *states) if tensor is not None]


def test_what_sampling_keeps_is_forecast_of_a_model_with_another_kind_of_cache():
    config = BloomConfig(vocab_size=352, hidden_size=32, n_layer=2, n_head=4)
    model = BloomForCausalLM(config).to("meta")
    assert sampling_bytes(model, num_tokens=10) == 2 * 2 * 32 * 4 * 10


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_rows_that_call_tools_without_their_schemas_are_told_by_plan_and_run(
    tmp_path, tiny_models, method
):
    turns = [calls(LAMP), reply("12"), answer("12")]
    rows = {
        "sft": [*ROWS, {"messages": [user("A lamp?"), *turns]}],
        "dpo": [*PAIRS, {"prompt": [user("A lamp?")], "chosen": turns, "rejected": [answer("7")]}],
    }[method]
    start = tiny_models.folder("llama", "chatml")
    project = project_of(tmp_path, start, method, rows)

    told = plan(project).notes
    project.train()

    [note] = [note for note in told if "call tools but have no `tools`" in note]
    assert note.startswith(f"1 of {len(rows)} rows ")
    assert note in project.reporter.notes


@pytest.mark.parametrize(
    ("minutes", "seconds", "note"),
    [
        (None, 9000.0, []),
        (10, 600.0, []),
        (10, None, []),
        (10, 1100.0, ["trainer.max_minutes 10 ends the run after about 50 of 100 steps"]),
        (1, 9000.0, ["trainer.max_minutes 1 ends the run after about 1 of 100 steps"]),
    ],
)
def test_a_plan_says_after_which_step_the_time_limit_ends_the_run(minutes, seconds, note):
    config = CONFIGS["sft"].model_validate(
        {
            "dataset_type": "sft",
            "data": {"batch_size": 8},
            "model": {"path": "m"},
            "trainer": {"max_minutes": minutes},
        }
    )

    assert forecast.describe_limit(config, 100, seconds, 100.0) == note
