"""Notes on an import that the user should read before training, such as providers' terms."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stillroom.data.row_notes import later_system_notes
from stillroom.fences import safe_name
from stillroom.importing.formats.datasets.tables import NO_COLUMN
from stillroom.importing.output.rows import TOOLS_UNKNOWN, UNKNOWN_PROVIDER, RolloutCounts
from stillroom.importing.output.split import Split
from stillroom.importing.payloads.messages import IMAGES_DROPPED
from stillroom.importing.records import INCOMPLETE, NO_CALL_FOUND, NO_NUMBER
from stillroom.importing.request import ImportRollouts
from stillroom.importing.tally import ImportTally
from stillroom.lineage import AnsweringModel, ModelRecord
from stillroom.rollout.rewards.rewards import SUCCESS_THRESHOLD

_MAX_SHOWN, _MAX_NAMES = 3, 12


def notes_on_files(
    tally: ImportTally, unknown: Sequence[Path], grown: Sequence[Path]
) -> Iterator[str]:
    """Yields notes on files of which nothing was read, on tables of feedback, and on growing files.

    `unknown` are the files of an unknown format.
    """
    refused, unknown_names = dict(tally.files.refused), set(map(tally.show_path, unknown))
    for path in unknown_names:
        refused.pop(path, None)
    for path, file in [*refused.items()][:_MAX_SHOWN]:
        reason, _ = file.reasons.most_common(1)[0]
        rows = "its table was" if file.columns else f"all {file.num_rows} rows were"
        yield (
            f"nothing was read from {safe_name(path)}: {rows} refused ({reason})"
            f"{_advice_on(reason, file.columns)}"
        )
    if len(refused) > _MAX_SHOWN:
        yield f"nothing was read from {len(refused) - _MAX_SHOWN} more files"
    if unknown:
        names = _join_names(path.name for path in unknown[:_MAX_SHOWN])
        more = len(unknown) - _MAX_SHOWN
        yield (
            f"{len(unknown)} files have an unknown format: {names}"
            + (f" and {more} more" if more > 0 else "")
            + f"; if one has feedback: {_COLUMNS_OF_FEEDBACK}"
        )
    for path, table in [*tally.files.feedback.items()][:_MAX_SHOWN]:
        scores = ", ".join(map(safe_name, [*table.scores][:_MAX_NAMES]))
        yield (
            f"{safe_name(path)} was read as feedback, with the scores in {scores} and the ids in "
            f"{safe_name(table.target)}: {table.num_matched} of {table.num_scores} scores match an "
            f"imported call or session; if these are the wrong columns: {_COLUMNS_OF_FEEDBACK}"
        )
    if grown:
        yield f"{len(grown)} files grew during the import: import again to get the new rows"


_COLUMNS_OF_FEEDBACK = 'set columns=["id=COLUMN", "score=COLUMN"]'


def _advice_on(reason: str, columns: Sequence[str]) -> str:
    """Returns advice on how to import a file that was refused for this reason, or ""."""
    if reason == NO_COLUMN:
        names = ", ".join(map(safe_name, columns[:_MAX_NAMES]))
        return f"; if it is feedback: {_COLUMNS_OF_FEEDBACK}; its columns are {names}"
    if reason == NO_CALL_FOUND:
        return (
            "; set feedback_by to the log's field that has the feedback's ids. If the ids are in "
            f"another column: {_COLUMNS_OF_FEEDBACK}"
        )
    if reason == NO_NUMBER:
        return "; a score is a number or a word such as up and down, good and bad, yes and no"
    return ""


def import_notes(
    request: ImportRollouts,
    counts: RolloutCounts,
    models: Mapping[tuple[str, str], int],
    split: Split | None,
) -> Iterator[str]:
    """Yields notes on the rollouts."""
    yield from _notes_on_content(counts)
    if counts.reserved_addresses and not request.keep_personal:
        yield (
            f"{counts.reserved_addresses} rollouts keep email addresses in domains reserved for "
            "examples (.example, .test, .local and similar), because no mail reaches these: to "
            "drop the rows, use not_contains of filter_dataset with match=conversation"
        )
    yield from _notes_on_scores(request, counts)
    if counts.ambiguous_prompts:
        by_reward = (
            ""
            if request.reward_from or counts.rewarded
            else "set reward_from, so that the best answer counts, or "
        )
        yield (
            f"{counts.ambiguous_prompts} prompts have different answers, none of them known to be "
            f"wrong: all are kept{', without an expected_answer' if request.prompts else ''}. If "
            f"only one can be right, {by_reward}score them with a judge or rewards.py "
            "(score_rollouts); dedupe of filter_dataset drops only rows with equal answers"
        )
    if request.prompts and counts.unanswered_prompts:
        yield (
            f"{counts.unanswered_prompts} prompts have no expected_answer, because all answers are "
            "wrong or truncated. These are often the hard prompts, and evaluate_model skips them "
            "unless you score with a judge or rewards.py"
        )
    if request.prompts and counts.contradicted_prompts:
        yield (
            f"{counts.contradicted_prompts} prompts have a rollout that is scored as correct but "
            "does not match the source's expected_answer: score with a judge or rewards.py instead"
        )
    if split is not None:
        yield from split.notes
    yield from terms_notes(models)


def _notes_on_content(counts: RolloutCounts) -> Iterator[str]:
    """Yields notes on images, tools and turns."""
    if counts.empty_answers:
        yield (
            f"{counts.empty_answers} rollouts end with an empty answer: convert_rollouts leaves "
            "out those that no reward calls a success, and filter_dataset with "
            "require_final_answer leaves out all"
        )
    if missing := counts.dropped[IMAGES_DROPPED]:
        yield (
            f"{missing} rollouts had images, which are left out: their answers describe what a "
            "text model cannot see"
        )
    if unknown := counts.dropped[TOOLS_UNKNOWN]:
        yield (
            f"{unknown} rollouts call tools whose schemas were not logged: convert_rollouts takes "
            "them from a tools.py with the called functions, and infer_tools infers them from the "
            "calls"
        )
    if incomplete := counts.dropped[INCOMPLETE]:
        yield (
            f"{incomplete} rollouts end with an answer although their source marks them as "
            f'not completed ("{INCOMPLETE}" in losses): they are kept, with stop_reason "answered"'
        )
    yield from later_system_notes(counts.later_system, counts.calls.count)
    if counts.unlogged_turns:
        yield (
            f"{counts.unlogged_turns} assistant turns are not the reply of a logged call, such as "
            "few-shot examples, edited replies, or replies of missing calls: they have weight 0 "
            "and are not trained on"
        )


def _notes_on_scores(request: ImportRollouts, counts: RolloutCounts) -> Iterator[str]:
    """Yields notes on scores, feedback and rewards."""
    names = _join_names(name for name, _ in counts.scores.most_common(_MAX_NAMES)) or "none"
    if not request.reward_from and counts.rewarded:
        unjudged = counts.calls.count - counts.rewarded
        yield f"{counts.rewarded} rollouts have a reward from their source" + (
            f", and {unjudged} have none (they were not scored, or scoring failed): score "
            "these with score_rollouts"
            if unjudged
            else ""
        )
    elif not request.reward_from and counts.scores:
        yield (
            f"the sources have scores ({names}) but no reward: to leave out wrong answers, import "
            "again and name the scores for correctness in reward_from (ratings as stars>=4)"
        )
    if counts.conflicting_feedback:
        yield (
            f"{counts.conflicting_feedback} rollouts have feedback that disagrees with other "
            "feedback or with a score in their log: the lowest value is used"
        )
    if counts.differing_alternatives:
        yield (
            f"{counts.differing_alternatives} rollouts have different scores under the names that "
            "reward_from joins with |: the lowest one is used"
        )
    if counts.changing_scores:
        yield (
            f"{counts.changing_scores} rollouts have calls with different values of one score: the "
            "value of the latest call is used"
        )
    if counts.largest_reward > 1:
        is_all_right = SUCCESS_THRESHOLD <= counts.smallest_reward < counts.largest_reward
        yield (
            f"rewards go up to {counts.largest_reward:g}, but success means a reward of at least "
            f"0.5{', so that no rollout counts as wrong' if is_all_right else ''}: select rows "
            "with min_reward of filter_dataset, or import again with reward_from such as "
            '["reward>=N"], where N is the lowest good reward'
        )
    if request.reward_from and not counts.rewarded:
        yield (
            f"no rollout has all scores of reward_from; the sources have: {names}. If their names "
            "differ between sources, write a|b to accept either; to use another column of a "
            "table as a score, set score=COLUMN in columns"
        )


def _join_names(names: Iterable[str]) -> str:
    """Joins names from the sources."""
    return ", ".join(map(safe_name, names))


_TERMS_CHECKED = "2026-11"
"""When the table of terms was last checked; terms change."""
_MAX_MODELS = 40


@dataclass(frozen=True, slots=True)
class ProviderTerms:
    """A provider whose terms restrict training on its models' outputs."""

    title: str
    url: str
    restriction: str
    """What the terms restrict, in brief; only the terms themselves are binding."""
    providers: frozenset[str]
    models: re.Pattern[str]


def _terms(title: str, url: str, restriction: str, providers: str, models: str) -> ProviderTerms:
    return ProviderTerms(title, url, restriction, frozenset(providers.split()), re.compile(models))


_COMPETING = "restrict the training of competing models on its outputs"
_TERMS = (
    _terms("OpenAI", "https://openai.com/policies", _COMPETING, "openai azure azure_openai",
           r"(?:chatgpt|gpt-(?!oss|neo|j)|o\d(?:-|$)|codex|davinci|ft:gpt)"),
    _terms("Anthropic", "https://www.anthropic.com/legal", _COMPETING, "anthropic", "claude"),
    _terms("Google", "https://ai.google.dev/gemini-api/terms", _COMPETING,
           "google gemini vertex_ai gcp.gemini gcp.vertex_ai", "gemini"),
    _terms("Gemma", "https://ai.google.dev/gemma/terms",
           "also apply to models trained on its outputs to perform similarly",
           "", r"(?:code|med|pali|shield|t5)?gemma(?!-?[4-9](?!b))"),
    _terms("xAI", "https://x.ai/legal", _COMPETING, "xai x_ai", "grok"),
    _terms("AWS", "https://aws.amazon.com/service-terms/", _COMPETING,
           "bedrock aws_bedrock aws.bedrock amazon_bedrock amazon-bedrock", r"nova-|titan-"),
    _terms("AI21", "https://www.ai21.com", _COMPETING, "ai21", "jamba"),
    _terms("Cohere", "https://cohere.com/terms-of-use",
           "may restrict training models on its outputs", "cohere", "command"),
    _terms("Meta (Llama 2 and 3)", "https://www.llama.com/license/",
           "forbid improving other language models with outputs",
           "", r"(?:meta-)?llama-?v?[23](?![.p_\d]|-[1-3]-)"),
    _terms("Meta", "https://www.llama.com/license/",
           "require that models trained on outputs are named and licensed in a certain way",
           "meta", r"(?:meta-)?llama"),
    _terms("Tencent", "https://huggingface.co/tencent",
           "forbid improving other language models with outputs", "", "hunyuan"),
    _terms("Qwen", "https://huggingface.co/Qwen",
           "require that models trained on outputs say so",
           "", r"qwen-?2(?:\.5)?(?:-math|-vl)?-72b"),
)  # fmt: skip
"""The providers known to have such terms; others may have them too.

Checked on 2026-11-23 in copies of the pages: OpenAI's terms of use (of 2024-01), Anthropic's
commercial terms (quoted in 2025-08), those of the Gemini API (2025-05-20) and of Gemma up to
version 3 (2026-04-01; Gemma 4 is under Apache 2.0), xAI's terms of service, AWS's service terms for
Bedrock and AI21's terms (quoted in 2026), and the licenses of Llama 2 to 4, of Hunyuan, and of
Qwen2.5-72B. No copy of Cohere's terms includes that section. Mistral's (2026-01) mention images
only, and DeepSeek's license allows it.
"""
_VENDOR = re.compile(r"(?:[a-z][a-z0-9-]*\.){1,2}(?=[a-z])")
"""The region and vendor prefix of a model's name on Bedrock."""


def terms_for(provider: str, model: str) -> ProviderTerms | None:
    """Returns the terms for a model's outputs, by its name or else provider; None if unknown."""
    name = _VENDOR.sub("", model.rpartition("/")[2].lower(), count=1)
    by_name = next((terms for terms in _TERMS if terms.models.match(name)), None)
    if by_name is not None:
        return by_name
    return next((terms for terms in _TERMS if provider.lower() in terms.providers), None)


def model_records(models: Counter[tuple[str, str]]) -> Iterator[ModelRecord]:
    """Yields a manifest record for each model that answered, the most frequent first.

    `models` has the number of rows by provider and model.
    """
    for (provider, model), rows in models.most_common(_MAX_MODELS):
        terms = terms_for(provider, model)
        yield ModelRecord(
            role="policy",
            name=model,
            location=model if provider == UNKNOWN_PROVIDER else provider,
            answered_by=[AnsweringModel(model=model, rows=rows)],
            terms=None if terms is None else terms.url,
        )


def terms_notes(models: Mapping[tuple[str, str], int]) -> Iterator[str]:
    """Yields a note for each provider whose terms restrict training on its models' outputs."""
    answered: dict[str, dict[str, None]] = {}
    by_title = {terms.title: terms for terms in _TERMS}
    for provider, model in models:
        if (terms := terms_for(provider, model)) is not None:
            answered.setdefault(terms.title, {})[model] = None
    for title, names_of_models in answered.items():
        names, terms = list(names_of_models), by_title[title]
        more = len(names) - 3
        first = _join_names(names[:3])
        shown = first + (f" and {more} more" if more > 0 else "")
        yield (
            f"outputs of {shown}: the terms of {title}, as of {_TERMS_CHECKED}, "
            f"{terms.restriction}; read them before training: {terms.url}"
        )
