import json
from collections import Counter
from dataclasses import replace

import pytest
import yaml

from stillroom.data.instruction import RemovedSystem
from stillroom.evaluate.intervals import Estimate, share_estimate
from stillroom.export.card import CardFacts, render_card
from stillroom.export.conversation import EvaluatedConversation, TrainedConversation
from stillroom.export.history import History, RecordedEvaluation, TrainingStage
from stillroom.export.provenance import DataStep, Licence, licence_of, read_licence
from stillroom.export.serving import ReadBack, ServingFacts, UsageExample, WrittenModel
from stillroom.models.resolve import ModelLocation

BASE = ModelLocation("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", is_local=False)
STEPS = (
    DataStep("convert_rollouts", "sft.jsonl", {"converted": 280}),
    DataStep("generate_rollouts", "rollouts/t.jsonl", {"rows": 300}, "openrouter/x-70b",
             "openrouter"),
)  # fmt: skip
SFT = TrainingStage("sft", "sft-1", 12, BASE.name, "commit 0123456789ab", "sft.jsonl", STEPS)
DISTILL = TrainingStage(
    "distill", "distill-1", 60, "sft-1", train_file="prompts.jsonl", teacher="Qwen/Qwen3-8B"
)
KL = Estimate(value=0.02, low=0.01, high=0.03, n=90)


def facts(
    kind="merged", *, stages=(SFT, DISTILL), base=BASE, licence=None, measured=(), system=None
):
    served = ServingFacts(
        "./out", "out", "bf16", 4096, "hermes", "base" if kind == "adapter" else None, 8
    )
    return CardFacts(
        History(base, BASE.name, stages, measured),
        licence,
        UsageExample(kind, "out", served, "out.gguf" if kind == "gguf" else None, system=system),
        "runs/distill-1/checkpoints/final",
        WrittenModel(
            "bf16", "hermes", read_back=ReadBack(positions=200, same_token=0.995, kl=1e-4)
        ),
    )


def header_of(card):
    return yaml.safe_load(card.split("---\n")[1])


def test_the_header_names_base_licence_methods_and_synthetic_data():
    header = header_of(render_card(facts(licence=Licence("apache-2.0"))))
    assert header == {
        "base_model": "Qwen/Qwen3-0.6B",
        "base_model_relation": "finetune",
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["stillroom", "sft", "on-policy-distillation", "distillation", "synthetic-data"],
    }
    own = Licence("other", "llama3.2", "LICENSE.txt")
    assert header_of(render_card(facts(licence=own)))["license_name"] == "llama3.2"
    assert header_of(render_card(facts("adapter")))["base_model_relation"] == "adapter"
    assert header_of(render_card(facts("gguf")))["base_model_relation"] == "quantized"
    two = Licence("mit, apache-2.0")
    assert "license" not in header_of(render_card(facts(licence=two)))


def test_the_card_tells_the_whole_chain():
    measured = (
        RecordedEvaluation(
            "evaluate-1", "final", "heldout.jsonl", share_estimate(270, 300), "Qwen/Qwen3-8B", KL,
            temperature=0.0,
        ),
    )  # fmt: skip
    card = render_card(facts(measured=measured))
    assert "by supervised fine-tuning, then on-policy distillation." in card
    assert "| base model | Qwen/Qwen3-0.6B (commit 0123456789ab) |" in card
    assert "| teacher | openrouter/x-70b, Qwen/Qwen3-8B |" in card
    assert "- `rollouts/t.jsonl`: generate_rollouts by openrouter/x-70b (rows 300)" in card
    assert "Qwen/Qwen3-8B scored every token." in card
    assert "Teachers answered through openrouter. The terms of a teacher or provider may" in card
    assert "0.900 [0.861, 0.929] | 0.020 [0.010, 0.030] (Qwen/Qwen3-8B) | evaluate-1 |" in card
    assert "Answers of run evaluate-1 were sampled at temperature 0." in card
    assert "at 99.5% of 200 positions (KL 1.0e-04 nats)" in card
    assert card.endswith("`export.json`.\n")


def test_the_student_that_answered_for_pairs_is_no_teacher_and_files_are_told_once():
    own = DataStep("generate_rollouts", "rollouts/s.jsonl", {"rows": 300}, "sft-1", "hf")
    pairs = DataStep("make_dpo_pairs", "pairs.jsonl", {"pairs": 90})
    dpo = TrainingStage(
        "dpo", "dpo-1", 4, "sft-1", train_file="pairs.jsonl", data=(pairs, own, STEPS[1])
    )
    card = render_card(facts(stages=(SFT, dpo)))
    assert "| teacher | openrouter/x-70b |" in card
    assert "generate_rollouts by sft-1" in card
    assert card.count("generate_rollouts by openrouter/x-70b") == 1


def test_a_card_says_that_nobody_knows_who_wrote_the_rows():
    sft = TrainingStage("sft", "sft-1", 4, BASE.name, train_file="sft.jsonl", data=STEPS[:1])
    card = render_card(facts(stages=(sft,)))
    assert "| teacher | unknown |" in card
    assert "- The files do not say who wrote the answers that were trained. If it was" in card
    for stages in ((SFT, DISTILL), ()):
        assert "do not say who wrote" not in render_card(facts(stages=stages))


def test_a_model_that_scored_itself_is_its_teacher():
    own = DataStep("generate_rollouts", "rollouts/s.jsonl", {"rows": 300}, "Qwen/Qwen3-0.6B", "hf")
    sft = TrainingStage("sft", "sft-1", 4, "Qwen/Qwen3-0.6B", train_file="s.jsonl", data=(own,))
    scored = TrainingStage("distill", "distill-1", 4, "sft-1", teacher="Qwen/Qwen3-0.6B")
    assert "| teacher | unknown |" in render_card(facts(stages=(sft,)))
    assert "| teacher | Qwen/Qwen3-0.6B |" in render_card(facts(stages=(sft, scored)))


def test_a_card_says_that_rows_were_learnt_from_a_teachers_probabilities():
    loss = "forward KL at temperature 4 over its whole vocabulary"
    soft = replace(SFT, teacher="Qwen/Qwen3-8B", soft_targets=loss)
    card = render_card(facts(stages=(soft,)))
    assert "with the token probabilities of Qwen/Qwen3-8B as soft targets, not only" in card
    assert f"sampled tokens: {loss}." in card
    assert "Qwen/Qwen3-8B |" in card


def test_names_cannot_break_a_table_or_add_lines():
    stage = TrainingStage("sft", "a|b\n# c", 1, BASE.name, train_file="x|y.jsonl")
    card = render_card(facts(stages=(stage,)))
    assert "\n# c" not in card
    row = next(line for line in card.splitlines() if line.startswith("| training 1"))
    assert row.replace("\\|", "").count("|") == 3


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: apache-2.0\n---\n# x", Licence("apache-2.0")),
        ("\ufeff---\nlicense: mit\n---\n", Licence("mit")),
        (
            "---\nlicense: other\nlicense_name: qwen\nlicense_link: LICENSE\n---\n",
            Licence("other", "qwen", "LICENSE"),
        ),
        ("---\nlicense: [mit, apache-2.0]\n---\n", Licence("mit, apache-2.0")),
        ("# A model under apache-2.0", None),
        ("---\nlicense: mit\n", None),
        ("---\nlicense: 3\n---\n", None),
        ("---\n- license\n---\n", None),
        ("---\n{: [\n---\n", None),
        ("", None),
    ],
)
def test_the_licence_is_what_the_header_of_the_card_says(card, licence):
    assert read_licence(card) == licence


def test_the_licence_comes_from_the_bases_own_files_or_from_the_user(tmp_path):
    base = ModelLocation("mine", str(tmp_path), is_local=True)
    assert licence_of(base) is None
    assert licence_of(None) is None
    assert licence_of(BASE) is None  # never fetched from the hub
    assert licence_of(ModelLocation("demo/student", "/", is_local=True)) == Licence("apache-2.0")
    mine = Licence("mit", source="the user's config.yml")
    stated = licence_of(base, mine)
    assert stated == mine
    assert "Base model: mit, according to the user's config.yml." in render_card(
        facts(licence=stated)
    )

    text = "                 Apache License\n           Version 2.0, January 2004\n"
    (tmp_path / "LICENSE").write_text(text, encoding="utf-8")
    source = "LICENSE in its folder"
    assert licence_of(base, mine) == Licence("apache-2.0", link="LICENSE", source=source)
    (tmp_path / "LICENSE").write_text("Terms of Mine", encoding="utf-8")
    assert licence_of(base) == Licence("other", link="LICENSE", source=source)
    text = "---\nlicense: gemma\n---\n# Mine"
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    assert licence_of(base, mine) == Licence("gemma")


def test_rows_that_say_what_their_teacher_read_are_synthetic():
    rows = Counter({"": 9})
    removed = Counter({RemovedSystem("0" * 16, "Add a fee."): 9})
    trained = TrainedConversation(9, rows, Counter({b"[]": 9}), removed)
    stage = TrainingStage("sft", "sft-1", 1, BASE.name, conversation=trained)
    card = render_card(facts(stages=(stage,)))
    assert "synthetic-data" in header_of(card)["tags"]
    assert "| teacher | a model whose name is unknown |" in card


SYSTEM = 'You are "Bo" of the shop.\n```\nAnswer briefly.'
TOOL = {"type": "function", "function": {"name": "price", "parameters": {}}}


def conversation(systems, *, tools=()):
    rows = Counter(systems)
    return TrainedConversation(
        rows.total(), rows, Counter({json.dumps(tools).encode(): rows.total()})
    )


def with_conversation(trained):
    return replace(SFT, conversation=trained, eval_metrics={"eval/held/pass1": 0.93})


def evaluation(run_id, system, share, *, questions="same", name="mine"):
    began = EvaluatedConversation(system, questions)
    accuracy = share_estimate(50 + round(50 * share), 100)
    return RecordedEvaluation(run_id, name, "heldout.jsonl", accuracy, None, None, began)


def test_the_card_shows_the_conversation_as_it_was_trained():
    trained = conversation({SYSTEM: 9, "": 1}, tools=[TOOL])
    shown = facts(stages=(with_conversation(trained),), system=SYSTEM)
    card = render_card(replace(shown, usage=replace(shown.usage, has_tools=[TOOL])))

    assert "9 of 10 training rows begin with this system message: send it unchanged." in card
    assert f"````text\n{SYSTEM}\n````" in card
    assert (
        "The tools of 10 of 10 rows of sft.jsonl are `price`; their schemas are in `tools.json`."
        in card
    )
    python = card.split("```python\n")[1].split("\n```")[0]
    messages = python[python.index("messages = ") : python.index("inputs = ")]
    names: dict[str, object] = {}
    exec(messages, names)  # noqa: S102
    assert names["messages"] == [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "…"},
    ]
    assert 'tools = json.loads(Path("./out/tools.json")' in python
    assert "messages, tools=tools, add_generation_prompt=True" in python
    assert "Measured during training, at step 12 of run sft-1: held/pass1 0.930." in card


def test_the_tools_of_a_distillation_are_those_of_the_training_before_it():
    sft = with_conversation(conversation({SYSTEM: 10}, tools=[TOOL]))
    distill = replace(DISTILL, conversation=conversation({SYSTEM: 10}))

    card = render_card(facts(stages=(sft, distill)))
    alone = render_card(facts(stages=(distill,)))

    assert "The tools of 10 of 10 rows of sft.jsonl are" in card
    assert "The prompts do not list tools; the manifest names the files with the tools." in alone


def test_the_card_of_rows_without_a_system_message_says_to_send_none():
    card = render_card(facts(stages=(with_conversation(conversation({"": 10})),)))

    assert "10 of 10 training rows have no system message: send none." in card
    assert '"role": "system"' not in card
    assert "The rows have no tools." in card


@pytest.mark.parametrize(
    ("others", "text"),
    [
        (
            (("bare", "", 0.0, "same"),),
            "Without it, the accuracy on the same 100 tasks was 0.500 [0.404, 0.596] (run bare)",
        ),
        ((("bare", "", 0.0, "other"),), "The accuracy without it was not measured."),
        ((("else", "another", 0.0, "same"),), "The accuracy without it was not measured."),
        ((), "The accuracy without it was not measured."),
    ],
)
def test_the_card_says_what_leaving_the_system_message_out_costs_where_it_was_measured(
    others, text
):
    measured = (
        evaluation("with", SYSTEM, 1.0, name="final"),
        *(evaluation(r, system, share, questions=q) for r, system, share, q in others),
    )
    stage = with_conversation(conversation({SYSTEM: 10}))
    card = render_card(facts(stages=(stage,), measured=measured))

    assert text in card
    assert "| final | heldout.jsonl | 100 |" in card


def test_the_card_says_what_the_model_acts_on_without_reading_it():
    removed = RemovedSystem("0123456789abcdef", "Add a fee of 7 | coins.")
    conversation = TrainedConversation(9, Counter({"": 9}), Counter({b"[]": 9}))
    rows = replace(conversation, removed=Counter({removed: 8}))
    read = "the system message 'Add a fee.' and the text of rules.md (sha256 0123)"
    card = render_card(
        facts(
            stages=(
                replace(SFT, conversation=rows),
                replace(DISTILL, conversation=conversation, instruction=read),
            )
        )
    )

    said = card.partition("## Conversation")[2].partition("## Use")[0]
    assert (
        "The model was trained to follow an instruction that it does not read: in run distill-1"
        in said
    )
    assert f"the teacher read {read}." in said
    assert "8 rows of run sft-1 were answered by a teacher" in said
    assert "begins with 'Add a fee of 7 | coins.' (sha256 0123456789abcdef)" in said
    assert "9 of 9 training rows have no system message: send none." in said
    assert "act as if told" not in render_card(facts())
