"""Three tasks for a small real student; held-out tasks are of training forms or of new ones."""

from office import OFFICE_TASK
from returns import RETURNS_TASK
from task import Task
from tickets import TICKETS_TASK

TASKS: dict[str, Task] = {task.name: task for task in (TICKETS_TASK, OFFICE_TASK, RETURNS_TASK)}
