"""The files of a recipe's folder, which are rewritten only if their content changes.

When an interrupted recipe resumes, the runs that read an unchanged file are recognised as done.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel

from stillroom.data.formats import load_tasks
from stillroom.files import content_hash, read_json, write_atomic, write_json
from stillroom.lineage import matches_record, read_manifest, record_file
from stillroom.outputs import new_output
from stillroom.recipe.answers import AnswerForm
from stillroom.recipe.inputs import RecipePrompt
from stillroom.tools.user.file import read_user_file

_Document = TypeVar("_Document", bound=msgspec.Struct)
_MAX_FILES = 1000
_ANSWERS_TOOL = '''"""Reduces an answer of the teacher to the label or JSON object in it."""

from stillroom.recipe.answers import {kind}
from stillroom.tools import tool

ANSWERS = {answers!r}


@tool
def rewrite(answer: str) -> str:
    """Returns the answer that the text names, or nothing if it names none or several."""
    return ANSWERS.named(answer) or ""
'''


class RecipeFiles:
    """The folder with one recipe's prompts, rows and configurations, created if it is missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write_prompts(self, name: str, prompts: Iterable[RecipePrompt]) -> Path:
        """Writes prompts, one per line."""
        return self.write_rows(name, (one.row for one in prompts))

    def write_text(self, name: str, text: str) -> None:
        """Writes a text as it is."""
        self._write(name, text.encode())

    def write_rows(self, name: str, rows: Iterable[dict[str, Any]]) -> Path:
        """Writes rows, one per line, without a manifest."""
        data = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
        return self._write(f"{name}.jsonl", data)

    def prompts_to_ask(self, name: str, prompts: Iterable[RecipePrompt]) -> list[Path]:
        """Returns the prompts files of this name; prompts that none of them has go into a new file.

        Each prompt is in a single file, whose run resumes or is done, so it is paid for once.
        """
        files = [self.folder / f"{name}-{n}.prompts.jsonl" for n in range(1, _MAX_FILES)]
        existing = [file for file in files if file.exists()]
        written_ids = {task.task_id for file in existing for task in load_tasks(file)}
        new = {one.task_id: one for one in prompts if one.task_id not in written_ids}
        if new:
            existing.append(self.write_prompts(f"{name}-{len(existing) + 1}.prompts", new.values()))
        return existing

    def write_answers_tool(self, answers: AnswerForm) -> Path:
        """Writes answers.py, with which convert_rollouts reduces a reply to the answer in it."""
        code = _ANSWERS_TOOL.format(kind=type(answers).__name__, answers=answers)
        return self._write("answers.py", code.encode())

    def copy_code(self, name: str, source: Path) -> None:
        """Copies a user's tools.py or rewards.py, with its modules, next to the configurations."""
        file = read_user_file(source)
        for relative, code in {**file.modules, name: file.code}.items():
            path = self.folder / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write(relative, code)

    def config_path(self, name: str, key: object) -> Path:
        """Returns the path of the config.yml for training runs with this `key`."""
        return self.folder / f"{name}-{content_hash(key)[:8]}.yml"

    def write_config(self, path: Path, make: Callable[[], str]) -> Path:
        """Writes the config.yml of a training run, unless it exists.

        The text from `make` depends on the time left, so after an interruption it would differ, and
        the training run could not resume.
        """
        return path if path.exists() else self._write(path.name, make().encode())

    def stored_document(
        self, name: str, key: object, kind: type[_Document], make: Callable[[], _Document]
    ) -> _Document:
        """Returns the document stored for a `key`; if there is none yet, makes and stores it."""
        path = self.folder / f"{name}-{content_hash(key)[:8]}.json"
        if not path.exists():
            write_json(path, make())
        return read_json(path, kind)

    def write_extended(
        self,
        name: str,
        base: Path,
        added: Sequence[dict[str, object]],
        request: BaseModel,
        inputs: Sequence[Path],
    ) -> Path:
        """Writes the rows of the `base` file and then the `added` rows, with their manifest."""
        lines = [*base.read_bytes().splitlines(), *map(msgspec.json.encode, added)]
        return self.write_recorded(name, lines, request, [base, *inputs])

    def write_recorded(
        self,
        name: str,
        lines: Sequence[bytes],
        request: BaseModel,
        inputs: Sequence[Path],
        left_out: Mapping[str, int] | None = None,
    ) -> Path:
        """Writes lines that are derived from the `inputs`, with their manifest.

        left_out: the number of omitted rows, by reason.
        """
        path = self.folder / f"{name}.jsonl"
        data = b"".join(line + b"\n" for line in lines)
        if path.exists() and path.read_bytes() == data and read_manifest(path) is not None:
            return path
        with new_output(path, operation="run_recipe", overwrite=False) as output:
            for line in lines:
                output.rows.write_raw(line)
            records = [record_file(file) for file in inputs]
            output.record(
                inputs=records, request=request, counts={"rows": len(lines)}, left_out=left_out
            )
        return path

    def _write(self, name: str, data: bytes) -> Path:
        path = self.folder / name
        if not path.exists() or path.read_bytes() != data:
            write_atomic(path, data)
        return path


def is_up_to_date(output: Path, request: BaseModel) -> bool:
    """Returns whether an operation has written this output for the same request and files."""
    manifest = read_manifest(output) if output.exists() else None
    return (
        manifest is not None
        and manifest.request == request.model_dump(mode="json")
        and all(matches_record(one.file, one) for one in (manifest.output, *manifest.inputs))
    )
