"""What the documents name is there."""

import itertools
import re
from pathlib import Path
from typing import get_args

import pytest

from fakes.documents import blocks_of
from fakes.source_tree import ROOT, imports_of, module_of, starts
from stillroom.train.config.distill_sections import SoftTargetsSection
from stillroom.train.config.losses import LOSSES
from stillroom.train.config.schema import CONFIGS, section_of
from stillroom.train.config.sections import DpoSection
from stillroom.train.on_policy.alarms import MAX_GAP
from stillroom.train.planning.forecast import describe_learning
from stillroom_mcp.resources.texts import page_files, page_text, page_titles

ARCHITECTURE = ROOT / "docs/architecture.md"
_HEADING = re.compile(r"###? +(?P<title>.+)")
_STATION = re.compile(r"\d+\. `(?P<file>(?:engine|server)/[\w./-]+\.py)`")


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "CLAUDE.md",
        "CONTRIBUTING.md",
        "docs/architecture.md",
        "docs/benchmarks.md",
        "docs/losses.md",
    ],
)
def test_every_file_that_a_document_names_is_there(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:tests|benchmarks|docs|skills|scripts)/[\w./-]+)`", text))

    assert document not in {"docs/benchmarks.md", "docs/losses.md"} or named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def flows(text: str) -> dict[str, list[str]]:
    """Returns the files of each numbered list in order, by the heading above it."""
    listed: dict[str, list[str]] = {}
    title = ""
    for line in text.splitlines():
        if heading := _HEADING.match(line):
            title = heading["title"]
        elif station := _STATION.match(line):
            listed.setdefault(title, []).append(station["file"])
    return listed


def gaps(files: list[str]) -> list[str]:
    """Returns where a flow's file neither imports the next nor starts it as a process."""
    paths = [ROOT / file for file in files]
    missing = [f"{file} is not there" for file in files if not (ROOT / file).is_file()]
    return missing or [
        f"{here.relative_to(ROOT)} does not import {then.relative_to(ROOT)}"
        for here, then in itertools.pairwise(paths)
        if module_of(then) not in imports_of(here) and not starts(here, module_of(then))
    ]


def test_flows_are_read_from_numbered_lists_of_files():
    text = """
## A prompt becomes a row
Some words about `engine/stillroom/errors.py`.
1. `engine/stillroom/jobs/supervise.py`: starts runs
   and goes on in the next line.
2. `engine/stillroom/jobs/keeper.py`: starts a process
3. `engine/stillroom/api/worker.py`: is that process
## Words
1. `word`: what it means
"""
    listed = flows(text)
    assert list(listed) == ["A prompt becomes a row"]
    assert gaps(listed["A prompt becomes a row"]) == []
    assert gaps(["engine/stillroom/errors.py", "engine/stillroom/jobs/worker.py"]) == [
        "engine/stillroom/errors.py does not import engine/stillroom/jobs/worker.py"
    ]
    assert gaps(["engine/stillroom/gone.py"]) == ["engine/stillroom/gone.py is not there"]


def test_each_file_of_a_flow_leads_to_the_next():
    listed = flows(ARCHITECTURE.read_text(encoding="utf-8"))
    assert len(listed) >= 3
    assert [gap for files in listed.values() for gap in gaps(files)] == []


def test_every_module_and_folder_that_the_architecture_names_is_there():
    of_users = {"tools.py", "rewards.py"}
    named = set(re.findall(r"`([\w./-]+(?:\.py|/))`", ARCHITECTURE.read_text(encoding="utf-8")))
    of_runs = {"adapters/", "brought_back/", "ranks/", "tensorboard/", ".stillroom/"}
    assert {"rollout/context.py", "remote/follower/"} <= named
    gone = [
        name
        for name in sorted(named - of_users - of_runs)
        if not (ROOT / name).exists() and not any((ROOT / "engine").glob(f"stillroom/**/{name}"))
    ]
    assert gone == []


def test_each_recipe_names_files_that_hold_what_it_names():
    recipes = ARCHITECTURE.read_text(encoding="utf-8").partition("## How to add")[2]
    for recipe in recipes.split("\n\n"):
        named = re.findall(r"`([\w./]+)`", recipe)
        paths = [name for name in named if re.search(r"/\w+\.(py|yml)$", name)]
        found = [first_of(ROOT / name, ROOT / "engine/stillroom" / name) for name in paths]
        held = "".join(path.read_text(encoding="utf-8") for path in found)
        words = {word for name in named if "/" not in name for word in name.split(".")}
        unknown = [word for word in sorted(words) if word not in held]
        assert unknown == [], f"no file named in this recipe contains {unknown}: {recipe}"


def first_of(*paths: Path) -> Path:
    """Returns the first path that exists."""
    return next(path for path in paths if path.exists())


@pytest.mark.parametrize("loss", LOSSES)
def test_the_skill_on_config_names_every_loss(loss: str) -> None:
    skill = (ROOT / "skills/distillation-config/SKILL.md").read_text(encoding="utf-8")
    [row] = [line for line in skill.splitlines() if line.startswith("| `algorithm.loss_fn` |")]
    assert f"`{loss}`" in row


LOSSES_PAGE = ROOT / "docs/losses.md"


def test_the_page_on_losses_has_each_loss_with_a_formula():
    formulas = "".join(block.text for block in blocks_of(LOSSES_PAGE))
    soft_losses = get_args(SoftTargetsSection.model_fields["loss"].annotation)
    named = {*LOSSES, *soft_losses, *get_args(DpoSection.model_fields["loss"].annotation)}
    assert [name for name in sorted(named) if name not in formulas] == []


def test_functions_that_the_page_on_losses_names_are_in_their_files():
    text = LOSSES_PAGE.read_text(encoding="utf-8")
    listed = re.findall(r"((?:`\w+`(?:, | and )?)+) in `(engine/[\w/]+\.py)`", text)
    assert len(listed) > 8
    for names, file in listed:
        source = (ROOT / file).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"(def|class) {name}\b", source), f"{name} in {file}"


def test_defaults_that_the_page_on_losses_gives_are_those_of_config_yml():
    text = LOSSES_PAGE.read_text(encoding="utf-8")
    given = re.findall(r"`(\w+\.\w+)` \(([\w.]+)(?:: [^)]*|, [^)]*)?\)", text)
    assert len(given) > 20
    for key, default in given:
        section, name = key.split(".")
        classes = [section_of(config, section) for config in CONFIGS.values()]
        fields = [one.model_fields[name] for one in classes if one and name in one.model_fields]
        assert default in {str(field.default) for field in fields}, key


@pytest.mark.parametrize(
    "place",
    [
        "skills/off-policy-distillation/references/rollouts.md",
        "skills/rollout-quality/SKILL.md",
        "engine/stillroom/projects/templates/starter/rewards_example.py",
    ],
)
def test_that_rewards_are_summed_is_said_where_they_are_written(place: str) -> None:
    text = " ".join((ROOT / place).read_text(encoding="utf-8").split())

    assert re.search(r"[Ss]everal rewards are (summed|added up)", text)
    assert re.search(r"a (success from a )?sum of 0\.5", text)
    assert "precondition" in text


@pytest.mark.parametrize(
    "place",
    [
        "docs/symptoms.md",
        "skills/on-policy-distillation/SKILL.md",
        "skills/on-policy-distillation/references/curricula.md",
    ],
)
def test_the_gap_that_a_document_calls_wrong_is_the_one_that_raises_the_alarm(place: str) -> None:
    text = (ROOT / place).read_text(encoding="utf-8")
    [line] = [line for line in text.splitlines() if "`logprob_gap`" in line]

    assert [float(gap) for gap in re.findall(r"[Aa]bove (\d[\d.]*\d)", line)] == [MAX_GAP]


def test_pages_that_skills_and_errors_name_are_there():
    named = {
        name
        for folder in ("skills", "engine", "server")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".md", ".py")
        for name in re.findall(r"`stillroom docs ([a-z/-]+)`", path.read_text(encoding="utf-8"))
    }
    assert {"traces", "remote"} <= named <= set(page_files())


def test_every_page_and_skill_has_a_title_in_the_list_of_pages():
    titles = page_titles()
    assert {"traces", "skills/distil", "skills/distillation-config"} <= titles.keys()
    assert "skills/off-policy-distillation/references/refine" in titles
    assert [name for name, title in titles.items() if not title] == []
    assert page_text("skills/distil/SKILL.md").startswith("---\nname: distil\n")


@pytest.mark.parametrize(
    ("millions", "size", "rates"),
    [(50, "below 100M", {"1e-3"}), (135, "100M to 400M", {"1e-3", "2e-4"})],
)
def test_the_plan_and_the_skill_advise_the_same_rates_for_a_size(
    millions: int, size: str, rates: set[str]
) -> None:
    section = {"dataset_type": "sft", "data": {"train_file": "rows.jsonl", "batch_size": 8}}
    model = {"path": "m", "qlora_rank": 32}
    config = CONFIGS["sft"].model_validate(
        section | {"model": model, "trainer": {"num_epochs": 1, "learning_rate": 1e-4}}
    )
    [note] = describe_learning(config, millions * 1_000_000)
    skill = (ROOT / "skills/distillation-config/SKILL.md").read_text(encoding="utf-8")
    [row] = [line for line in skill.splitlines() if line.startswith("| `trainer.learning_rate` |")]
    [advice] = [part for part in row.split(";") if part.strip().startswith(size)]

    assert set(re.findall(r"\de-\d", advice)) == rates
    advised = {rate.replace("e-0", "e-") for rate in re.findall(r"\de-\d+", note)}
    assert advised - {"1e-4"} == rates  # 1e-4 is the rate of the configuration
