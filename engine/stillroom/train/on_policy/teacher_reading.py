"""The tokens of a student's rollout as its teacher reads them, where they differ from its own.

A rollout is read by a function from its task and its trace, so that a teacher may have a prompt of
its own. Shapes: none; everything here is one rollout.
"""

from collections.abc import Callable, Sequence

from stillroom.data.chat.render import ChatRenderer
from stillroom.data.formats import Task
from stillroom.data.instruction import PromptViews
from stillroom.errors import ModelError
from stillroom.train.loop.student_environment import StudentEnvironment
from stillroom.types import TokenTrace, ToolSchema

Reading = Callable[[Task, TokenTrace, Sequence[ToolSchema]], TokenTrace | None]
"""Returns a rollout as its teacher reads it, from its prompt row, its tokens and its tools.

The student's sampled tokens are marked as `sampled` in it. None: the student's own tokens.
"""


def reading_of_teacher(environment: StudentEnvironment) -> Reading | None:
    """Returns how the teacher reads rollouts; None: it reads the student's own tokens."""
    if environment.views.are_equal:
        return None
    renderer = ChatRenderer(
        environment.student.loaded.tokenizer,
        include_thinking=environment.rollout.include_thinking,
        variables=environment.variables,
    )
    return own_prompt(renderer, environment.views)


def own_prompt(renderer: ChatRenderer, views: PromptViews) -> Reading:
    """Returns the reading of a teacher that reads the same tokens after a prompt of its own.

    `renderer` is the one that rendered the student's prompts.
    """

    def read(task: Task, trace: TokenTrace, tools: Sequence[ToolSchema]) -> TokenTrace | None:
        messages = views.student.put_before(task.messages)
        teacher_messages = views.teacher.put_before(task.messages)
        if teacher_messages == messages:
            return None
        prompt, own = (renderer.prompt_ids(each, tools) for each in (messages, teacher_messages))
        start = len(prompt)
        if trace.ids[:start] != prompt:
            raise ModelError(
                f"the rollout of task {task.task_id} does not begin with the tokens of its prompt, "
                "so the teacher cannot read it after a prompt of its own",
                "leave teacher.system, teacher.context_file and model.system out",
            )
        return TokenTrace(
            ids=own + trace.ids[start:],
            sampled=[False] * len(own) + trace.sampled[start:],
            logprobs=[0.0] * len(own) + trace.logprobs[start:],
        )

    return read
