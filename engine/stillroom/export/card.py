"""The model card (README.md), which states only recorded facts."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from stillroom import __version__
from stillroom.evaluate.intervals import Estimate
from stillroom.export.conversation import MAX_ROWS
from stillroom.export.history import History, RecordedEvaluation, TrainingStage
from stillroom.export.provenance import DataStep, Licence
from stillroom.export.serving import (
    TOOLS,
    ReadBack,
    UsageExample,
    VerifiedAccuracy,
    WrittenModel,
    snippets,
)
from stillroom.teachers.providers import IN_PROCESS

CARD = "README.md"
_UNKNOWN = "unknown"
_UNNAMED = "a model whose name is unknown"
_METHODS = {
    "sft": "supervised fine-tuning",
    "dpo": "preference optimisation (DPO)",
    "distill": "on-policy distillation",
}
_TAGS = {"sft": ["sft"], "dpo": ["dpo"], "distill": ["on-policy-distillation"]}
_RELATIONS = {"merged": "finetune", "text": "finetune", "adapter": "adapter", "gguf": "quantized"}
_LIBRARIES = {"merged": "transformers", "text": "transformers", "adapter": "peft"}


@dataclass(frozen=True, slots=True)
class CardFacts:
    """The facts that the card states."""

    history: History
    licence: Licence | None
    usage: UsageExample
    source: str
    """The path of the checkpoint for display."""
    written: WrittenModel
    verified: Sequence[VerifiedAccuracy] = ()
    """The accuracy of the written files with each program that loaded them."""


def render_card(facts: CardFacts) -> str:
    """Returns the model card as Markdown with a YAML header."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=False,  # noqa: S701 - Markdown; the filters cell and inline clean users' names
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    filters: dict[str, Any] = environment.filters
    filters.update(cell=_cell, inline=_inline)
    history, usage, written = facts.history, facts.usage, facts.written
    return environment.get_template("card.md.j2").render(
        header=yaml.safe_dump(header(facts), sort_keys=False, allow_unicode=True),
        name=_inline(usage.name),
        summary=_summary(facts),
        version=__version__,
        base=_base(history),
        stages=[_stage(stage) for stage in history.stages],
        teacher=", ".join(history.teachers) or (_UNNAMED if history.is_instructed else _UNKNOWN),
        numbers=_UNKNOWN if written.precision == "auto" else written.precision,
        other_parts=written.other_parts,
        source=facts.source,
        data=list(dict.fromkeys(_data_step(s) for stage in history.stages for s in stage.data)),
        data_notes=list(_data_notes(history)),
        licence=list(_licence(facts)),
        measured=[_evaluation_cells(row) for row in history.evaluations],
        other_measures=list(_other_measures(history)),
        more_evaluations=history.num_evaluations - len(history.evaluations),
        in_training=_in_training(history),
        conversation=list(_system_lines(history)),
        system=_fenced(history.conversation.system) if history.conversation else None,
        tools=_tools(history),
        template=_template(facts),
        read_back=_read_back(
            written.read_back, is_gguf=usage.format == "gguf", is_verified=bool(facts.verified)
        ),
        verified=[result.sentence for result in facts.verified],
        snippets=snippets(usage),
        closing="SHA-256 and size of every file are in `export.json`.",
    )


def header(facts: CardFacts) -> dict[str, Any]:
    """Returns the card's YAML metadata for model hubs."""
    history, kind = facts.history, facts.usage.format
    fields: dict[str, Any] = {}
    # Only hub models: a path on this machine means nothing to other people.
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
    accepts_images = facts.written.is_multimodal and kind != "gguf"
    task = "image-text-to-text" if accepts_images else "text-generation"
    return {**fields, "pipeline_tag": task, "tags": tags}


def _summary(facts: CardFacts) -> str:
    history = facts.history
    subject = {
        "merged": "All weights of a model",
        "text": "All weights of a model",
        "adapter": "A LoRA adapter",
        "gguf": "A GGUF file of a model",
    }[facts.usage.format]
    methods = [_METHODS.get(stage.method, stage.method) for stage in history.stages]
    origin = f" made from `{_inline(history.base_name)}` by {', then '.join(methods)}"
    synthetic = (
        " Its training data was written or scored by models." if history.is_synthetic else ""
    )
    return f"{subject}{origin if methods else ''}.{synthetic}"


def _base(history: History) -> str:
    """Returns the name of the base model, with its commit or hash if known."""
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
    authors = f" by {', '.join(step.authors)}" if step.authors else ""
    return f"`{step.output}`: {step.operation}{authors} ({counts})"


def _data_notes(history: History) -> Iterator[str]:
    """Yields sentences about rows of unknown origin, and about data that the teacher scored."""
    for stage in history.stages:
        if not stage.data and stage.method != "distill":
            yield f"The origin of {stage.train_file or 'the training rows'} is {_UNKNOWN}."
        elif stage.method == "distill":
            yield (
                f"In run {stage.run_id}, the model was trained on its own rollouts for the prompts "
                f"of {stage.train_file or 'a file'}; {stage.teacher or 'the teacher'} scored every "
                "token."
            )
        if stage.soft_targets is not None:
            rows = "the rows of its cold start" if stage.method == "distill" else "the rows"
            yield (
                f"In run {stage.run_id}, the model was trained on {rows} with the token "
                f"probabilities of {stage.teacher or 'the teacher'} as soft targets, not only on "
                f"the sampled tokens: {stage.soft_targets}."
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
        yield f"Base model: {licence.id}{custom_name}{link}, according to {licence.source}."
    external = [name for name in facts.history.providers if name not in IN_PROCESS]
    if external:
        yield (
            f"Teachers answered through {', '.join(external)}. The terms of a teacher or "
            "provider may restrict the use of its outputs: check them."
        )
    elif facts.history.teachers:
        teachers = facts.history.teachers
        label, licences = (
            ("Teachers", "the licence of each") if len(teachers) > 1 else ("Teacher", "its licence")
        )
        yield (
            f"{label}: {', '.join(teachers)}. Check whether {licences} restricts the use of its "
            "outputs."
        )
    elif facts.history.stages and not facts.history.is_synthetic:
        yield (
            "The files do not say who wrote the answers that were trained. If it was a model, its "
            "terms may restrict the use of its outputs: find out which one it was, and check them."
        )


def _evaluation_cells(row: RecordedEvaluation) -> Sequence[str]:
    """Returns the cells of an evaluation in the table of the card."""
    kl = _UNKNOWN if row.teacher_kl is None else f"{_interval(row.teacher_kl)} ({row.teacher})"
    return [row.name, row.data, str(row.accuracy.n), _interval(row.accuracy), kl, row.run_id]


def _other_measures(history: History) -> Iterator[str]:
    """Yields the other measurements of the latest evaluation, and the cost of a task."""
    for row in history.evaluations[:1]:
        if row.temperature is not None:
            yield f"Answers of run {row.run_id} were sampled at temperature {row.temperature:g}."
        if row.other_measures:
            yield f"Run {row.run_id} also measured: {'; '.join(row.other_measures)}."
    if history.costs is not None:
        yield history.costs


def _in_training(history: History) -> str | None:
    """Returns a sentence about the evaluation metrics during training; None without any."""
    last = history.stages[-1] if history.stages else None
    if last is None or not last.eval_metrics:
        return None
    metrics = ", ".join(
        f"{name.removeprefix('eval/')} {v:.3f}" for name, v in last.eval_metrics.items()
    )
    return f"Measured during training, at step {last.step} of run {last.run_id}: {metrics}."


def _tools(history: History) -> str:
    """Returns a sentence about the tools of the training rows; "" if unknown."""
    last = history.conversation
    if last is None:
        return ""
    stage = history.stage_with_tools
    trained = stage.conversation if stage is not None else None
    if stage is None or trained is None:
        num_with_tools = last.num_rows - last.tools.most_common(1)[0][1]
        if num_with_tools:
            return f"{num_with_tools} of {last.num_rows} rows have tools."
        if history.stages[-1].method == "distill":
            return "The prompts do not list tools; the manifest names the files with the tools."
        return "The rows have no tools."
    names = ", ".join(f"`{_inline(str(s['function'].get('name')))}`" for s in trained.tool_schemas)
    num_same = trained.tools.most_common(1)[0][1]
    rows = f"{num_same} of {trained.num_rows} rows of {_inline(stage.train_file or stage.run_id)}"
    return f"The tools of {rows} are {names}; their schemas are in `{TOOLS}`."


def _template(facts: CardFacts) -> str:
    if facts.usage.format == "gguf":
        return "The chat template is in the GGUF file, and `--jinja` applies it."
    return "The chat template and the tokenizer in this folder are those of training."


def _fenced(text: str | None) -> str | None:
    """Returns a text as a code block, with a fence longer than any run of backticks in it."""
    if not text:
        return None
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _read_back(read_back: ReadBack | None, *, is_gguf: bool, is_verified: bool) -> str | None:
    if read_back is None:
        return None
    loaded = "merged weights, from which the GGUF file was made," if is_gguf else "written files"
    closing = " The GGUF file itself was not loaded." if is_gguf and not is_verified else ""
    return (
        f"The {loaded} were reloaded: the most probable token was the same as the trained model's "
        f"at {read_back.same_token:.1%} of {read_back.positions} positions (KL {read_back.kl:.1e} "
        f"nats).{closing}"
    )


def _system_lines(history: History) -> Iterator[str]:
    """Yields sentences on the system message: how many rows have it, and its effect."""
    yield from _instructions(history)
    trained = history.conversation
    if trained is None:
        yield f"The system message and the tools of the training rows are {_UNKNOWN}."
        return
    system, num = trained.system, trained.systems.most_common(1)[0][1]
    total = f"the first {trained.num_rows}" if trained.num_rows == MAX_ROWS else trained.num_rows
    if system is None:
        yield f"{num} of {total} training rows have no system message: send none."
        return
    yield f"{num} of {total} training rows begin with this system message: send it unchanged."
    if num < trained.num_rows:
        yield f"The others have {len(trained.systems) - 1} different system messages, or none."
    yield _effect_of_system(history, system)


def _instructions(history: History) -> Iterator[str]:
    """Yields sentences on instructions that the model learnt to follow without reading them."""
    for stage in history.stages:
        if stage.instruction is not None:
            yield (
                "The model was trained to follow an instruction that it does not read: in run "
                f"{stage.run_id}, the teacher read {stage.instruction}."
            )
        removed = stage.conversation.removed if stage.conversation is not None else Counter()
        if removed:
            most_common, num = removed.most_common(1)[0]
            yield (
                f"The model was trained to follow an instruction that it does not read: {num} rows "
                f"of run {stage.run_id} were answered by a teacher whose system message begins "
                f"with {most_common.begins!r} (sha256 {most_common.sha256})."
            )


def _effect_of_system(history: History, system: str) -> str:
    """Returns a sentence with the accuracies with and without the system message."""
    for row in history.evaluations:
        for other in history.evaluations:
            conversation, other_conversation = row.conversation, other.conversation
            if (
                conversation is None
                or other_conversation is None
                or conversation.questions != other_conversation.questions
            ):
                continue
            if conversation.system == system and other_conversation.system == "":
                return (
                    f"Without it, the accuracy on the same {row.accuracy.n} tasks was "
                    f"{_interval(other.accuracy)} (run {other.run_id}); with it, "
                    f"{_interval(row.accuracy)} (run {row.run_id})."
                )
    return "The accuracy without it was not measured."


def _cell(text: str) -> str:
    return _inline(text).replace("|", "\\|")


def _inline(text: str) -> str:
    return " ".join(text.split())
