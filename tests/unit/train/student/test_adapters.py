"""The layers of each family that a LoRA adapter is put on, and that it can be merged and kept."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer

from fakes.conversations import answer, user
from fakes.families import FAMILIES, build_family, save_family
from fakes.training import make_project
from stillroom.errors import ConfigError
from stillroom.train.config.request import PlanTraining
from stillroom.train.config.sections import ModelSection
from stillroom.train.loop.checkpoints import restore_weights
from stillroom.train.planning.plan import plan_training
from stillroom.train.student.adapters import choose_targets, describe_adapter, new_adapter
from stillroom.train.student.model import load_student

ATTENTION = "q_proj k_proj v_proj o_proj"
MLP = "gate_proj up_proj down_proj"


def section(**settings):
    return ModelSection(path="base", qlora_rank=4, **settings)


def adapted(model) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def trained(model) -> PeftModel:
    """Puts numbers that are not zero where training would put them."""
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    return model


@pytest.mark.parametrize("family", ["qwen3", "llama3", "qwen3.5", "phi3", "lfm2"])
def test_by_default_an_adapter_is_on_what_all_linear_of_peft_is(family):
    peft = get_peft_model(
        build_family(family), LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    )

    ours = new_adapter(build_family(family), section())

    assert adapted(ours) == adapted(peft)
    assert ours.peft_config["default"].target_modules == peft.peft_config["default"].target_modules


@pytest.mark.parametrize(
    ("family", "names", "barred"),
    [
        ("llama4", f"{ATTENTION} {MLP}", ""),
        ("gpt-oss", ATTENTION, ""),
        ("qwen3-moe", ATTENTION, ""),
        ("qwen2-moe", f"{ATTENTION} {MLP}", ""),
        # peft takes the names of the dense and shared layers for the experts'.
        ("deepseek-v3", "q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj o_proj", MLP),
        ("granite4", f"input_linear output_linear in_proj {ATTENTION}", "out_proj"),
        ("nemotron-h", f"in_proj up_proj down_proj {ATTENTION}", "out_proj"),
        ("mamba2", "in_proj", "out_proj"),
        ("jamba", f"in_proj {MLP} {ATTENTION}", "x_proj dt_proj out_proj"),
        ("minimax", f"qkv_proj out_proj output_gate {ATTENTION}", ""),
    ],
)
def test_an_adapter_is_on_mixers_and_mlps_but_not_on_routers_and_experts(family, names, barred):
    targets = choose_targets(build_family(family), None)

    assert {name.rpartition(".")[2] for name in targets.modules} == set(names.split())
    assert targets.parameters == []
    assert targets.unsupported == barred.split()


@pytest.mark.parametrize("choice", ["auto", "all-linear"])
@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3.5", "gpt-oss", "nemotron-h", "zamba2"])
def test_a_trained_adapter_is_merged_and_read_again_exactly(tmp_path, family, choice):
    ids = torch.randint(0, 352, (1, max(FAMILIES[family].lengths)))
    model = trained(new_adapter(build_family(family), section(lora_targets=choice)))
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        model.save_pretrained(tmp_path, save_embedding_layers=False)
        read = PeftModel.from_pretrained(build_family(family), tmp_path).eval()
        again, merged = read(input_ids=ids).logits, model.merge_and_unload()(input_ids=ids).logits

    assert torch.equal(again, expected)
    # The merged weights are rounded, which recurrent layers amplify.
    assert (merged - expected).abs().max() < 1e-3 * expected.abs().max()


@pytest.mark.parametrize("choice", ["all-linear", ["q_proj", "experts"]])
def test_experts_are_trained_by_choice(choice):
    model = new_adapter(build_family("gpt-oss"), section(lora_targets=choice))

    loss = model(input_ids=torch.arange(12)[None]).logits.log_softmax(-1)[0, :, 5].sum()
    loss.backward()

    of_experts = [
        w for name, w in model.named_parameters() if "experts" in name and w.requires_grad
    ]
    # Two layers with two stacks of weights, A and B.
    assert len(of_experts) == 8
    assert all(weight.grad is not None for weight in of_experts)
    assert "the experts are trained" in describe_adapter(model)


def test_a_list_names_layers_by_any_part_of_their_names():
    targets = choose_targets(build_family("llama3"), ["self_attn.q_proj", "layers.1.mlp"])

    assert targets.modules == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        *(f"model.layers.1.mlp.{name}" for name in MLP.split()),
    ]


@pytest.mark.parametrize(
    ("family", "names", "problem"),
    [
        ("llama3", ["q_proj", "v_porj"], "named 'v_porj'.*did you mean 'v_proj'"),
        ("llama3", ["lm_head"], "named 'lm_head'"),
        ("mamba2", ["out_proj"], "no adapter can be put on out_proj"),
    ],
)
def test_names_without_a_layer_are_refused(family, names, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        choose_targets(build_family(family), names)

    assert "choose" in caught.value.fix


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:The following alpha_pattern keys:RuntimeWarning")
def test_a_resumed_run_keeps_the_layers_of_its_adapter(tmp_path, tiny_models):
    """Runs of earlier versions put theirs on routers and experts too."""
    base = save_family(tmp_path, "qwen3-moe")
    earlier = get_peft_model(
        build_family("qwen3-moe"),
        LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    earlier.save_pretrained(tmp_path / "step_000001", save_embedding_layers=False)

    student = load_student(
        tiny_models.workspace,
        ModelSection(path=str(base), qlora_rank=4),
        seed=0,
        resumed=tmp_path / "step_000001",
    )

    restore_weights(student, tmp_path / "step_000001")
    of_student = dict(student.module.named_parameters())
    trained_names = {name for name, weight in of_student.items() if weight.requires_grad}
    assert trained_names == {name for name in of_student if "lora_" in name}
    for name, weight in earlier.named_parameters():
        assert torch.equal(of_student[name], weight), name


def test_layers_cannot_be_chosen_for_an_adapter_that_has_its_own(tmp_path, tiny_models):
    base = tiny_models.folder("llama", "chatml")
    project = make_project(tmp_path, "sft", base, model={"qlora_rank": 4})
    project.write([{"messages": [user("Item?"), answer("12.")]}])
    project.train()
    chosen = ModelSection(path="run-1", qlora_rank=4, lora_targets="attention")

    with pytest.raises(ConfigError, match="whose layers cannot be changed"):
        load_student(project.workspace, chosen, seed=0)
    with pytest.raises(ConfigError, match="whose layers cannot be changed"):
        plan_training(
            project.workspace,
            PlanTraining(overrides=("model.path=run-1", "model.lora_targets=attention")),
        )


def test_the_plan_says_where_the_adapter_is(tmp_path):
    base = save_family(tmp_path / "models", "nemotron-h")
    project = make_project(tmp_path, "sft", base, model={"qlora_rank": 4})
    project.write([{"messages": [user("Item?"), answer("12.")]}] * 4)
    project.write_config()

    notes = plan_training(project.workspace, PlanTraining()).notes

    on = ", ".join(["in_proj", "up_proj", "down_proj", *ATTENTION.split()])
    assert f"the adapter is on 9 layers: {on}" in notes
    assert "no adapter can be put on out_proj of this model" in notes
    assert any("the experts are not trained" in note for note in notes)
