import json
from typing import get_args

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.errors import ConfigError, InputError
from stillroom.settings import Workspace
from stillroom.train.config.distill_sections import AlgorithmSection, TeacherSection
from stillroom.train.config.file import REFUSED_VALUES, UNSUPPORTED, config_notes, load_config
from stillroom.train.config.losses import LOSSES, LossName
from stillroom.train.config.request import PlanTraining, plan_request
from stillroom.train.methods.losses import LossFunctions, loss_functions

SFT = {
    "dataset_type": "sft",
    "data": {"batch_size": 4},
    "model": {"path": "m"},
    "trainer": {"num_epochs": 1},
}
DISTILL = {**SFT, "dataset_type": "distill", "teacher": {"path": "t"}}


def load(folder, config, *overrides, name="config.yml"):
    path = folder / name
    write = json.dumps if name.endswith(".json") else yaml.safe_dump
    path.write_text(config if isinstance(config, str) else write(config), encoding="utf-8")
    return load_config(path, overrides)


def refusal(folder, config, *overrides, **options):
    with pytest.raises(ConfigError) as caught:
        load(folder, config, *overrides, **options)
    assert str(folder) in caught.value.problem or "override" in caught.value.problem
    assert caught.value.fix
    return caught.value


def having(dotted, value, base=SFT):
    """Returns the configuration with one key set."""
    config = json.loads(json.dumps(base))
    *parents, last = dotted.split(".")
    target = config
    for part in parents:
        target = target.setdefault(part, {})
    target[last] = value
    return config


def test_a_nudge_that_nobody_says_is_refused(tmp_path):
    given = load(tmp_path, SFT, "rollout.termination_policy=max_turns", "rollout.nudge=Sure?")
    assert given.rollout.nudge == "Sure?"

    with pytest.raises(ConfigError, match="nudge requires termination_policy"):
        load(tmp_path, SFT, "rollout.nudge=Sure?")


def test_alpha_is_twice_the_rank_unless_it_is_given(tmp_path):
    assert load(tmp_path, having("model.qlora_rank", 8)).model.alpha == 16
    assert load(tmp_path, having("model.qlora_alpha", 5)).model.alpha == 5


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("dataset_typ", "dataset_type"),
        ("model.lora_rank", "qlora_rank"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_name(tmp_path, key, nearest):
    error = refusal(tmp_path, having(key, 1, DISTILL))

    assert f"{key} is not known (did you mean {nearest!r}?)" in error.problem


@pytest.mark.parametrize("key", ["dataset_type", "model.path"])
def test_a_missing_key_is_named(tmp_path, key):
    *parents, last = key.split(".")
    config = json.loads(json.dumps(SFT))
    target = config[parents[0]] if parents else config
    del target[last]

    assert f"{key} is required" in refusal(tmp_path, config).problem


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.batch_size", 0),
        ("trainer.num_epochs", 1.5),
        ("trainer.num_epochs", "three"),
        ("algorithm.loss_fn", "reinforce"),
    ],
)
def test_a_value_outside_its_range_is_refused_by_key_and_value(tmp_path, key, value):
    error = refusal(tmp_path, having(key, value, DISTILL))

    assert key in error.problem
    assert repr(value) in error.problem


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_what_other_systems_offer_and_this_one_does_not_is_refused_with_another_way(tmp_path, key):
    reason, fix = UNSUPPORTED[key]

    error = refusal(tmp_path, having(key, "x", DISTILL))

    assert error.problem.endswith(f"{key} is not supported: {reason}")
    assert error.fix == fix


def test_all_refused_and_unknown_keys_are_named_at_once(tmp_path):
    config = having("trainer.max_billing", 10, having("trainer.early_stop", 2, DISTILL))
    config = having("trainer.num_epoch", 3, {**config, "wandb_project": "orders"})
    config["evals"] = [{"eval_id": "x", "name": "heldout", "step": 100, "pass1_temp": 0}]

    error = refusal(tmp_path, config)

    for part in (
        "trainer.max_billing is not supported: ",
        "wandb_project is not supported: it belongs to the section trainer; ",
        "evals.0.eval_id is not supported: it names an evaluation of a hosted service; ",
        "trainer.early_stop is for dataset_type sft and dpo: ",
        "trainer.num_epoch is not known (did you mean 'num_epochs'?)",
        "evals.0.pass1_temp is not known",
    ):
        assert error.problem.count(part) == 1
    assert error.problem.count("eval_id") == 1
    assert "wandb_project: write trainer.wandb_project; " in error.fix
    unhashable = refusal(tmp_path, {**config, "dataset_type": ["sft"]})
    assert unhashable.problem.count("is not supported") == 3


@pytest.mark.parametrize("nothing", [None, False, []])
def test_an_unsupported_key_that_asks_for_nothing_is_let_through(tmp_path, nothing):
    key = next(iter(UNSUPPORTED))
    assert load(tmp_path, having(key, nothing, DISTILL)) == load(tmp_path, DISTILL)


@pytest.mark.parametrize(("key", "value"), REFUSED_VALUES)
def test_a_value_that_is_not_done_here_is_refused_with_another_way(tmp_path, key, value):
    error = refusal(tmp_path, having(key, value, DISTILL))

    assert f"{key}: {value} is not supported" in error.problem
    assert error.fix == REFUSED_VALUES[key, value][1]


@pytest.mark.parametrize("key", ["model.path", "teacher.path"])
def test_several_models_are_refused(tmp_path, key):
    assert f"{key} is a list" in refusal(tmp_path, having(key, ["a", "b"], DISTILL)).problem


@pytest.mark.parametrize(
    ("algorithm", "needed"),
    [
        ({"clip_ratio": 0.1}, "loss_fn ppo"),
        ({"top_k": 8}, "loss_fn top_k_reverse_kl"),
        ({"loss_fn": "jsd", "clip_ratio": 0.1}, "loss_fn ppo"),
        ({"loss_fn": "full_reverse_kl", "kl_baseline": "exact"}, "importance_sampling or ppo"),
        ({"loss_fn": "top_k_reverse_kl", "importance_cap": 2.0}, "importance_sampling or ppo"),
        ({"loss_fn": "ppo", "jsd_beta": 0.1}, "loss_fn jsd"),
        ({"loss_fn": "full_reverse_kl", "top_k": 4}, "loss_fn top_k_reverse_kl"),
        ({"adv_estimator": "gae", "gae_lambda": 0.9}, "reward_coef above 0"),
        ({"adv_estimator": "grpo", "gae_lambda": 0.9, "reward_coef": 1}, "adv_estimator gae"),
    ],
)
def test_an_option_that_the_loss_does_not_use_is_refused(tmp_path, algorithm, needed):
    error = refusal(tmp_path, {**DISTILL, "algorithm": algorithm})

    (name, *_) = (key for key in algorithm if f"algorithm.{key} needs" in error.problem)
    assert needed in error.problem
    # As it stands in the configuration that a run keeps.
    default = AlgorithmSection.model_fields[name].default
    load(tmp_path, {**DISTILL, "algorithm": {**algorithm, name: default}})


def test_the_tokens_that_a_server_lists_are_chosen_without_naming_the_loss(tmp_path):
    config = having("algorithm.top_k", 8, having("teacher.provider", "vllm", DISTILL))

    served = load(tmp_path, config).algorithm

    assert (served.loss_fn, served.served_top_k) == ("top_k_reverse_kl", 8)
    # In this process the loss of its own choice reads the whole vocabulary.
    error = refusal(tmp_path, config, "teacher.provider=hf")
    assert "algorithm.top_k needs loss_fn top_k_reverse_kl" in error.problem


def test_which_loss_is_taken_by_itself_depends_on_where_the_teacher_is():
    section = AlgorithmSection(kl_penalty_coef=0.5)
    local, remote = TeacherSection(path="t"), TeacherSection(path="t", provider="vllm")

    here, served = section.resolved(local), section.resolved(remote)

    assert (here.loss_fn, served.loss_fn) == ("full_reverse_kl", "top_k_reverse_kl")
    assert here.kl_coef == served.kl_coef == 0.5
    own = [AlgorithmSection(loss_fn=loss).kl_coef for loss in ("ppo", "full_reverse_kl")]
    assert own == [0.1, 1.0]
    named = AlgorithmSection(loss_fn="ppo")
    assert named.resolved(remote) is named


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_rewards_that_count_need_rollouts_to_compare(tmp_path, estimator):
    config = having("algorithm.adv_estimator", estimator, having("data.group_size", 1, DISTILL))

    error = refusal(tmp_path, config, "algorithm.reward_coef=0.5")

    assert "set data.group_size to 2 or more" in error.problem
    load(tmp_path, config, "algorithm.reward_coef=0.5", "data.group_size=2")
    load(tmp_path, config, "algorithm.reward_coef=0.5", "algorithm.adv_estimator=reinforce")


@pytest.mark.parametrize(("estimator", "size"), [("grpo", 4), ("gae", 4), ("reinforce", 1)])
def test_prompts_are_grouped_only_for_rewards_that_compare_their_rollouts(
    tmp_path, estimator, size
):
    config = having("algorithm.adv_estimator", estimator, DISTILL)

    assert load(tmp_path, config).data.group_size == 1
    assert load(tmp_path, config, "algorithm.reward_coef=0.5").data.group_size == size


def test_every_loss_has_its_functions():
    assert set(get_args(LossName)) == set(LOSSES)
    for name, loss in LOSSES.items():
        if not loss.is_policy_gradient:
            functions = loss_functions(AlgorithmSection(loss_fn=name))
            without_list = LossFunctions(functions.divergence).listed_divergence
            assert (functions.listed_divergence != without_list) == loss.needs_top_tokens


def test_a_loss_is_not_taken_for_another_one():
    functions = loss_functions(AlgorithmSection(loss_fn="full_reverse_kl"))

    with pytest.raises(NotImplementedError):
        functions.listed_divergence(*[torch.zeros(1)] * 4)


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo"])
def test_a_ratio_needs_samples_at_temperature_one(tmp_path, loss_fn):
    config = having("algorithm.loss_fn", loss_fn, having("rollout.temperature", 0.7, DISTILL))

    assert "rollout.temperature must be 1.0" in refusal(tmp_path, config).problem
    load(tmp_path, having("algorithm.loss_fn", "full_reverse_kl", config))
    load(tmp_path, {**config, "dataset_type": "sft"})


def test_a_key_of_another_type_is_left_out_with_a_note(tmp_path):
    config = {**DISTILL, "dataset_type": "sft", "algorithm": {"loss_fn": "ppo"}}
    config["data"] = {**config["data"], "group_size": 2}

    assert load(tmp_path, config, name="config.json") == load(
        tmp_path, {**DISTILL, "dataset_type": "sft"}
    )
    notes = config_notes(tmp_path / "config.json")
    assert "config.json: algorithm is ignored: it is for dataset_type distill" in notes
    assert "config.json: data.group_size is ignored: it is for dataset_type distill" in notes


@pytest.mark.parametrize("coef", [0, 0.5])
def test_an_estimator_of_advantages_without_a_reward_coef_is_named_as_ignored(tmp_path, coef):
    config = having("algorithm.adv_estimator", "grpo", DISTILL)
    load(tmp_path, having("algorithm.reward_coef", coef, config), name="config.json")

    notes = config_notes(tmp_path / "config.json")

    assert any("algorithm.adv_estimator is ignored: " in note for note in notes) == (coef == 0)


@pytest.mark.parametrize(
    ("method", "key", "value", "owners"),
    [
        ("sft", "trainer.max_steps", 3, "distill"),
        ("dpo", "curriculum.prefix_tokens", 4, "distill"),
        ("sft", "cold_start.train_file", "a", "distill"),
        ("distill", "trainer.early_stop", 2, "sft and dpo"),
        ("dpo", "soft_targets.top_k", 4, "sft and distill"),
        ("sft", "model.system", "", "distill"),
    ],
)
def test_a_key_that_says_another_type_is_meant_is_refused(tmp_path, method, key, value, owners):
    config = having(key, value, {**SFT, "dataset_type": method, "teacher": {"path": "t"}})
    name = key.partition(".")[0] if key.startswith(("cu", "co", "so")) else key

    error = refusal(tmp_path, config)

    assert f"{name} is for dataset_type {owners}: " in error.problem


def test_the_configuration_that_an_earlier_version_recorded_is_read(tmp_path):
    """It held the keys of all types, with their defaults."""
    recorded = {
        **SFT,
        "data": {"batch_size": 4, "group_size": 1, "val_split": 0.0},
        "trainer": {"num_epochs": 1, "max_steps": None, "early_stop": None},
        "model": {"path": "m", "system": None},
        "curriculum": {"prefix_tokens": None, "teacher_share": 0.0},
        "cold_start": None,
        "dpo": {"beta": 0.1},
        "algorithm": {"loss_fn": "full_reverse_kl"},
    }

    assert load(tmp_path, recorded, name="config.json") == load(tmp_path, SFT)


def test_a_number_of_steps_needs_no_note_on_the_epochs(tmp_path):
    config = {**DISTILL, "trainer": {"learning_rate": 1e-4}}
    load(tmp_path, config)
    path = tmp_path / "config.yml"

    assert "has no trainer.num_epochs" in config_notes(path)[0]
    assert config_notes(path, ["trainer.max_steps=5"]) == []


@pytest.mark.parametrize("key", ["max_staleness=1", "server={base_url: 'http://127.0.0.1:1/v1'}"])
def test_what_depends_on_when_rollouts_end_is_refused_in_a_deterministic_run(tmp_path, key):
    error = refusal(tmp_path, DISTILL, "rollout.deterministic=true", f"rollout.{key}")

    assert f"remove rollout.{key.partition('=')[0]}" in error.problem


def test_overrides_come_after_the_file_and_are_read_as_yaml(tmp_path):
    config = load(
        tmp_path,
        SFT,
        "trainer.num_epochs=3",
        "trainer.learning_rate=1e-5",
        "model.path=runs/a=b",
        "rollout.include_thinking=true",
        "description='two words'",
        "model.qlora_alpha=null",
    )

    assert config.trainer.num_epochs == 3
    assert config.trainer.learning_rate == 1e-5
    assert config.model.path == "runs/a=b"
    assert config.rollout.include_thinking is True
    assert config.description == "two words"
    assert config.model.qlora_alpha is None


EVALS = [{"name": "held", "step": 50, "file": "h.jsonl"}, {"name": "test", "step": 50}]


def test_an_entry_of_a_list_is_overridden_by_its_number(tmp_path):
    config = load(tmp_path, {**SFT, "evals": EVALS}, "evals.0.step=170", "evals.1.name=last")

    assert [(one.name, one.step) for one in config.evals] == [("held", 170), ("last", 50)]


@pytest.mark.parametrize("key", ["evals.2.step", "evals.-1.step", "evals.step"])
def test_an_entry_that_a_list_does_not_have_is_refused_with_how_many_it_has(tmp_path, key):
    with pytest.raises(ConfigError, match="'evals' has no entry") as caught:
        load(tmp_path, {**SFT, "evals": EVALS}, f"{key}=170")

    assert caught.value.fix == "give an index below 2, counted from 0"


def test_an_entry_of_an_empty_list_is_refused_without_an_index_to_give(tmp_path):
    with pytest.raises(ConfigError, match="'evals' has no entry '0'") as caught:
        load(tmp_path, {**SFT, "evals": []}, "evals.0.step=170")

    assert caught.value.fix.startswith("the list is empty: add its entries in the file")


@pytest.mark.parametrize(
    ("override", "reported"),
    [
        ("trainer.num_epochs", "is not section.key=value"),
        ("=3", "is not section.key=value"),
        ("trainer..num_epochs=3", "is not section.key=value"),
        ("trainer.num_epochs=[", "the value is not YAML"),
        ("dataset_type.path=3", "'dataset_type' is a value"),
        ("trainer.num_epoch=3", "did you mean 'num_epochs'?"),
        ("data.when=2020-13-45", "the value is not YAML"),
    ],
)
def test_an_override_that_cannot_be_used_is_refused(tmp_path, override, reported):
    assert reported in refusal(tmp_path, SFT, override).problem


def test_a_section_without_keys_says_nothing(tmp_path):
    text = yaml.safe_dump(SFT) + "rollout:\nalgorithm:\n"

    assert load(tmp_path, text) == load(tmp_path, SFT)
    assert load(tmp_path, text, "rollout.max_turns=2").rollout.max_turns == 2


def test_a_fault_of_syntax_names_its_line(tmp_path):
    error = refusal(tmp_path, "dataset_type: sft\ndata: [1\n")

    assert "config.yml:3: cannot be parsed" in error.problem


@pytest.mark.parametrize("text", ["", "sft", "- a", "7"])
def test_a_file_without_keys_is_refused(tmp_path, text):
    assert "must be a mapping of keys" in refusal(tmp_path, text).problem


@pytest.mark.parametrize("name", ["config.yml", "config.json"])
@pytest.mark.parametrize(
    "data",
    [b"\xff\xfe\x00", b"\x00", b"a: 2020-13-45", b"{", b"? [a]: b", b"a: !!python/object:x y",
     b"a: &a [*a]", b"1: 2", b"[" * 5000],
)  # fmt: skip
def test_bytes_that_are_no_configuration_are_refused(tmp_path, name, data):
    path = tmp_path / name
    path.write_bytes(data)

    with pytest.raises(ConfigError, match=r"config\.(yml|json)"):
        load_config(path)


@settings(max_examples=100)
@given(
    text=st.one_of(
        st.text(max_size=60),
        st.lists(
            st.sampled_from(["data", "model", ":", " ", "\n", "  ", "-", "[", "{", "}", "]", "&a",
                             "*a", "!!set", "1e3", "2020-01-01", "null", "?", "'", '"', "#", "|"]),
            max_size=15,
        ).map("".join),
    )
)  # fmt: skip
def test_no_text_makes_loading_fail_in_another_way(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "fuzzed.yml"
    path.write_text(text, encoding="utf-8", errors="replace", newline="")

    with pytest.raises(ConfigError):
        load_config(path)


def test_a_context_file_is_relative_to_the_configuration_and_must_be_readable(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"prompt": "a"}', encoding="utf-8")
    workspace = Workspace(tmp_path)
    config = {**DISTILL, "model": {"path": "demo/student"}}
    config["teacher"] = {"path": "demo/teacher", "context_file": "rules.md"}
    load(folder, config)

    with pytest.raises(InputError, match=r"teacher.context_file '.*rules\.md' does not exist"):
        plan_request(workspace, PlanTraining(config="project/config.yml"))
    (folder / "rules.md").write_text("Add seven.", encoding="utf-8")
    plan = plan_request(workspace, PlanTraining(config="project/config.yml"))

    assert plan.views.teacher.context == "Add seven."
    assert folder / "rules.md" in plan.inputs
    with pytest.raises(InputError, match="usually contain keys or passwords"):
        plan_request(
            workspace,
            PlanTraining(config="project/config.yml", overrides=("teacher.context_file=.env",)),
        )
