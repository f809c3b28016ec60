"""The model card, README.md: it states only what is on record."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from stillroom import __version__
from stillroom.evaluate.intervals import Estimate
from stillroom.export.history import History, RecordedEvaluation, TrainingStage
from stillroom.export.licence import Licence
from stillroom.export.provenance import DataStep
from stillroom.export.snippets import UsageExample, snippets
from stillroom.export.written import ReadBack
from stillroom.teachers.providers import IN_PROCESS

CARD = "README.md"
_UNKNOWN = "not on record"
_METHODS = {
    "sft": "supervised fine-tuning",
    "dpo": "preference optimisation (DPO)",
    "distill": "on-policy distillation",
}
_TAGS = {"sft": ["sft"], "dpo": ["dpo"], "distill": ["on-policy-distillation"]}
_RELATIONS = {"merged": "finetune", "adapter": "adapter", "gguf": "quantized"}
_LIBRARIES = {"merged": "transformers", "adapter": "peft"}


@dataclass(frozen=True, slots=True)
class CardFacts:
    """The facts that the card states."""

    history: History
    licence: Licence | None
    usage: UsageExample
    source: str
    """The checkpoint, as a user names it."""
    precision: str
    read_back: ReadBack | None


def render_card(facts: CardFacts) -> str:
    """Returns the model card as Markdown with a YAML header."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=False,  # noqa: S701 - Markdown; what users named goes through cell and inline
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    filters: dict[str, Any] = environment.filters
    filters.update(cell=_cell, inline=_inline)
    history, usage = facts.history, facts.usage
    return environment.get_template("card.md.j2").render(
        header=yaml.safe_dump(header(facts), sort_keys=False, allow_unicode=True),
        name=_inline(usage.name),
        summary=_summary(facts),
        version=__version__,
        base=_base(history),
        stages=[_stage(stage) for stage in history.stages],
        teacher=", ".join(history.teachers) or _UNKNOWN,
        numbers=_UNKNOWN if facts.precision == "auto" else facts.precision,
        source=facts.source,
        data=list(dict.fromkeys(_data_step(s) for stage in history.stages for s in stage.data)),
        data_notes=list(_data_notes(history)),
        licence=list(_licence(facts)),
        measured=[_measured(row) for row in history.evaluations],
        read_back=_read_back(facts.read_back),
        snippets=snippets(usage),
        closing="SHA-256 and size of every file are in `export.json`.",
    )


def header(facts: CardFacts) -> dict[str, Any]:
    """Returns the card's YAML metadata, as model hubs read it."""
    history, kind = facts.history, facts.usage.format
    fields: dict[str, Any] = {}
    # Only what others can find: a path of this machine is nobody's base model.
    if history.base is not None and not history.base.is_local:
        fields["base_model"] = history.base.location
        fields["base_model_relation"] = _RELATIONS[kind]
    if facts.licence is not None and "," not in facts.licence.id:
        fields["license"] = facts.licence.id
        if facts.licence.name:
            fields["license_name"] = facts.licence.name
        if facts.licence.link:
            fields["license_link"] = facts.licence.link
    if kind in _LIBRARIES:
        fields["library_name"] = _LIBRARIES[kind]
    methods = list(dict.fromkeys(stage.method for stage in history.stages))
    tags = ["stillroom", *(tag for method in methods for tag in _TAGS.get(method, []))]
    if history.is_synthetic:
        tags += ["distillation", "synthetic-data"]
    if kind == "gguf":
        tags.append("gguf")
    return {**fields, "pipeline_tag": "text-generation", "tags": tags}


def _summary(facts: CardFacts) -> str:
    history = facts.history
    subject = {
        "merged": "All weights of a model",
        "adapter": "A LoRA adapter",
        "gguf": "A GGUF file of a model",
    }[facts.usage.format]
    methods = [_METHODS.get(stage.method, stage.method) for stage in history.stages]
    made = f" made from `{_inline(history.base_name)}` by {', then '.join(methods)}"
    synthetic = " Its training data was written by models." if history.is_synthetic else ""
    return f"{subject}{made if methods else ''}.{synthetic}"


def _base(history: History) -> str:
    identity = history.stages[0].identity if history.stages else None
    return f"{history.base_name} ({identity})" if identity else history.base_name


def _stage(stage: TrainingStage) -> str:
    rows = f" on {stage.train_file}" if stage.train_file else ""
    return (
        f"{_METHODS.get(stage.method, stage.method)}{rows}, {stage.step} steps, from "
        f"{stage.started_from} (run {stage.run_id})"
    )


def _data_step(step: DataStep) -> str:
    counts = ", ".join(f"{name} {number}" for name, number in step.counts.items())
    by = f" by {step.teacher}" if step.teacher else ""
    return f"`{step.output}`: {step.operation}{by} ({counts})"


def _data_notes(history: History) -> Iterator[str]:
    for stage in history.stages:
        if not stage.data and stage.method != "distill":
            yield f"How {stage.train_file or 'the training rows'} came to be is {_UNKNOWN}."
        elif stage.method == "distill":
            yield (
                f"In run {stage.run_id} the model learnt from its own rollouts on the prompts of "
                f"{stage.train_file or 'a file'}; {stage.teacher or 'the teacher'} scored every "
                "token."
            )


def _licence(facts: CardFacts) -> Iterator[str]:
    licence = facts.licence
    if licence is None:
        yield (
            f"The licence of the base model {facts.history.base_name} is {_UNKNOWN}: look it up "
            "before you publish or use this model."
        )
    else:
        custom_name = f" ({licence.name})" if licence.name else ""
        link = f", {licence.link}" if licence.link else ""
        yield f"Base model: {licence.id}{custom_name}{link}, as its maker says."
    outside = [name for name in facts.history.providers if name not in IN_PROCESS]
    if outside:
        yield (
            f"Teachers answered through {', '.join(outside)}. Terms of a teacher or provider may "
            "restrict what its outputs are used for: check them."
        )
    elif facts.history.teachers:
        yield f"Teacher: {', '.join(facts.history.teachers)}; its licence applies to its outputs."


def _measured(row: RecordedEvaluation) -> Sequence[str]:
    kl = _UNKNOWN if row.teacher_kl is None else f"{_interval(row.teacher_kl)} ({row.teacher})"
    return [row.data, str(row.accuracy.n), _interval(row.accuracy), kl, row.run_id]


def _interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _read_back(read_back: ReadBack | None) -> str | None:
    if read_back is None:
        return None
    return (
        f"The written files were loaded again: the most probable token was the trained model's at "
        f"{read_back.same_token:.1%} of {read_back.positions} positions (KL {read_back.kl:.1e} "
        "nats)."
    )


def _cell(text: str) -> str:
    return _inline(text).replace("|", "\\|")


def _inline(text: str) -> str:
    return " ".join(text.split())
