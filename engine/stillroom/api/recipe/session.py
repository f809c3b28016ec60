"""What the stages of one recipe share: its plan, files, limits and findings so far."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stillroom.api.recipe.plan import RecipePlan
from stillroom.api.recipe.stages import Stages
from stillroom.data.chat.template import is_chatml_without_tools
from stillroom.errors import RunError
from stillroom.files import content_hash
from stillroom.models.tokenizer import tokenizer_for
from stillroom.recipe.answers import AnswerForm, LabelAnswers, PatternAnswers
from stillroom.recipe.files import RecipeFiles
from stillroom.recipe.inputs import RecipePrompt
from stillroom.recipe.request import Gate, Measured, RunRecipe
from stillroom.rollout.journal.shards import recorded_cost
from stillroom.rollout.request import GenerateRollouts
from stillroom.settings import Workspace

_EPISODE_OPTIONS = (
    "tools", "mcp_servers", "max_turns", "browse", "browse_allow", "termination_policy", "nudge"
)  # fmt: skip
PATTERN_FIELD = "answer_pattern"
_ASKING_SHARE = 0.3
"""The largest share of the remaining time that a stage may spend on asking the teacher."""


@dataclass(slots=True)
class RecipeSession:
    """The state of a recipe that is being run."""

    workspace: Workspace
    plan: RecipePlan
    stages: Stages
    files: RecipeFiles
    chat_template: str | None = None
    """The chat template that the student is measured and trained with; None: its own."""
    form: AnswerForm | None = None
    """The form of the answers: labels, JSON objects or lines of few patterns; None: free text."""
    teacher_tokens: int | None = None
    """The maximum number of tokens of a teacher's turn, once it is known how long its turns are.

    A budget reserves the price of this many tokens for each call in progress.
    """
    max_tokens: int = 0
    """The maximum number of tokens of a student's turn."""
    is_teacher_right: bool = False
    """Whether the teacher's answers count as right, since there are no labels."""
    prompt_s: float = 0.0
    """The seconds per prompt that the student takes in an evaluation."""
    caveats: list[str] = field(default_factory=list[str])
    problems: list[str] = field(default_factory=list[str])
    """The problems behind caveats, which may quote text from others."""
    measured: list[Measured] = field(default_factory=list[Measured])

    @property
    def request(self) -> RunRecipe:
        """The recipe's request."""
        return self.plan.request

    @property
    def student_system(self) -> str | None:
        """The system message that a trained student reads; None: that of its prompts.

        An instruction that is the same for all prompts is learnt with the task, so the student
        reads none (""). It then trains and answers in a fraction of the time.
        """
        return None if self.request.system is None else ""

    @property
    def episode_options(self) -> dict[str, Any]:
        """The options of any model's rollouts on these tasks: tools and limits of turns."""
        return {name: getattr(self.plan.teacher, name) for name in _EPISODE_OPTIONS}

    @property
    def has_tools(self) -> bool:
        """Whether models may call tools."""
        return self.plan.teacher.has_tools

    def choose_chat_template(self) -> None:
        """Sets the student's chat template: the request's, or another if its own leaves out tools.

        Tools are those of the session, of a prompt's container, and those called in prompts.
        Raises the errors of `tokenizer_for` if the request's does not suit the student.
        """
        if (name := self.request.chat_template) is not None:
            student = self.request.student
            tokenizer_for(
                self.workspace, student, "a recipe with chat_template", chat_template=name
            )
            self.chat_template = name
            return
        prompts = (*self.plan.prompts, *self.plan.labelled)
        if not self.has_tools and not any(prompt.has_tools for prompt in prompts):
            return
        tokenizer = tokenizer_for(self.workspace, self.request.student, "a recipe with tools")
        if is_chatml_without_tools(tokenizer.chat_template):
            self.chat_template = "chatml"

    @property
    def has_labels(self) -> bool:
        """Whether answers are from a small set."""
        return isinstance(self.form, LabelAnswers)

    @property
    def answer_field(self) -> str | None:
        """The metadata field of prompts with the kind of their right answer; None if there is none.

        The accuracy for each kind shows whether a student always gives the same one.
        """
        if self.has_labels:
            return "expected_answer"
        return PATTERN_FIELD if isinstance(self.form, PatternAnswers) else None

    @property
    def remaining_usd(self) -> float | None:
        """The dollars that are left of the budget; None without a budget."""
        budget = self.request.budget_usd
        return None if budget is None else budget - self.stages.spent_usd

    def share_of_budget(self, share: float, *, earlier_usd: float = 0.0) -> dict[str, float]:
        """Returns the option that limits a stage to a share of the dollars that are left.

        earlier_usd: what the stage's output may have cost already, which the option covers too.
        """
        left = self.remaining_usd
        return {} if left is None else {"budget_usd": earlier_usd + max(1e-6, share * left)}

    def add(self, measured: Measured) -> None:
        """Adds a measured accuracy to the result, and to the run's notes."""
        self.measured.append(measured)
        accuracy = measured.accuracy
        interval = (
            f" [{accuracy.low:.0%}, {accuracy.high:.0%}]"
            if accuracy.low is not None and accuracy.high is not None
            else ""
        )
        self.stages.note(
            f"{measured.name}: {accuracy.value:.0%}{interval} of {accuracy.n} {measured.prompts}"
        )

    def share_of_time(self, share: float) -> dict[str, float]:
        """Returns the option that limits a stage to a share of the minutes that are left."""
        left = self.stages.remaining_s
        return {} if left is None else {"max_minutes": max(0.1, share * left / 60)}

    def shown_path(self, name: str) -> str:
        """Returns the path of a file in the recipe's folder, relative to the workspace."""
        return self.workspace.shown(self.files.folder / name)

    def note_gaps(
        self, title: str, results: Sequence[Mapping[str, Any]], *, is_caveat: bool = True
    ) -> None:
        """Adds a note, and a caveat, if limits or failures left a stage incomplete.

        results: the results of the stage's runs.
        """
        counts = {
            name: sum(result.get(name) or 0 for result in results)
            for name in ("failed", "omitted", "unjudged")
        }
        missing = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        limits = dict.fromkeys(limit for result in results if (limit := result.get("stopped_by")))
        if missing or limits:
            reason = f" (its share of {' and '.join(limits)} was used up)" if limits else ""
            note = f"{title}: {missing or 'ended early'}{reason}"
            self.stages.note(note)
            if is_caveat and note not in self.caveats:
                self.caveats.append(note)

    def note_failure(self, consequence: str, problem: str) -> None:
        """Adds the consequence of a failed optional step to the caveats, and its problem."""
        self.caveats.append(f"{consequence} (see problems)")
        self.problems.append(f"{consequence}: {problem}")

    def stop_at(self, gate: Gate, problem: str) -> None:
        """Stops the recipe at a gate for the user to decide, unless the request accepts it.

        Raises RunError, which says what to decide and how to continue.
        """
        if gate in self.request.accept:
            self.caveats.append(f"accepted: {problem}")
            return
        accepted = [*self.request.accept, gate]
        raise RunError(
            problem,
            "ask the user; to continue, run_recipe(<same arguments>, accept="
            f"[{', '.join(accepted)}]): finished stages are reused and not paid for again",
        )


def ask_teacher(
    session: RecipeSession,
    title: str,
    name: str,
    prompts: Sequence[RecipePrompt],
    *,
    budget_share: float,
    are_gaps_caveats: bool = True,
    **options: object,
) -> list[Path]:
    """Lets the teacher answer prompts with a share of the remaining budget; returns the files.

    The files also have the rollouts of earlier calls' prompts under the same options: the teacher
    is not asked the same prompt again. title: the stage's title. name: the stem of the files'
    names. are_gaps_caveats: False if the caller itself reports how many answers are missing.
    options: options of generate_rollouts that differ from the recipe's.
    """
    shown, limit = session.workspace.shown, dict[str, object]()
    if session.teacher_tokens is not None:
        limit["max_tokens"] = session.teacher_tokens
    fields = {
        **limit,
        "tools": session.plan.teacher.tools,
        **session.plan.teacher_options,
        "seed": session.request.seed,
        **options,
    }
    outputs, results = list[Path](), list[Mapping[str, Any]]()
    stem = f"{name}-{content_hash(fields)[:6]}"
    for file in session.files.prompts_to_ask(stem, prompts):
        output = file.with_name(file.name.replace(".prompts.", ".rollouts."))
        request = {
            **fields,
            "input": shown(file),
            "output": shown(output),
            **session.share_of_budget(
                budget_share, earlier_usd=recorded_cost(output, with_lost=True).usd
            ),
            **session.share_of_time(_ASKING_SHARE),
        }
        run = session.stages.run(
            title, "generate_rollouts", GenerateRollouts.model_validate(request)
        )
        results.append(run.result or {})
        outputs.append(output)
    session.note_gaps(title, results, is_caveat=are_gaps_caveats)
    return outputs
