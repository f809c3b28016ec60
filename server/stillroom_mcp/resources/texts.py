"""The texts of the skills and of the documentation, in a checkout or an installed package."""

from dataclasses import dataclass
from pathlib import Path

import yaml

from stillroom.errors import InputError
from stillroom.validation import did_you_mean

_PACKAGE = Path(__file__).parent.parent
_SKILL_FILE = "SKILL.md"


@dataclass(frozen=True, slots=True)
class SkillText:
    """One file of a skill."""

    skill: str
    file: str
    """The path of the file in the skill's folder."""
    path: Path

    @property
    def uri(self) -> str:
        """The URI of the file as a resource."""
        return f"skill://{self.skill}/{self.file}"

    def read(self) -> str:
        """Returns the text of the file."""
        return self.path.read_text(encoding="utf-8")

    def description(self) -> str:
        """Returns the description of the skill, or the skill that a reference belongs to."""
        if self.file != _SKILL_FILE:
            return f"A reference of the skill {self.skill}."
        header = self.read().split("---\n", 2)[1]
        return str(yaml.safe_load(header)["description"])


def skill_texts() -> list[SkillText]:
    """Returns the files of all skills, sorted; empty if none is installed."""
    # In a checkout, the skills are next to the packages, for hosts that read them as files.
    folders = (_PACKAGE / "skills", _PACKAGE.parent.parent / "skills")
    folder = next((each for each in folders if each.is_dir()), None)
    if folder is None:
        return []
    files = sorted(
        folder.glob("*/**/*.md"), key=lambda path: (path.parent, path.name != _SKILL_FILE)
    )
    relative_paths = [(path, path.relative_to(folder)) for path in files]
    return [
        SkillText(skill=name.parts[0], file=name.relative_to(name.parts[0]).as_posix(), path=path)
        for path, name in relative_paths
    ]


def skill_text(skill: str, file: str = _SKILL_FILE) -> SkillText | None:
    """Returns a file of a skill, or None if it does not exist."""
    return next((t for t in skill_texts() if (t.skill, t.file) == (skill, file)), None)


def page_files() -> dict[str, Path]:
    """Returns the files of all pages by name, such as `traces` or `skills/distil`, sorted.

    Empty if none is installed.
    """
    # In a checkout, the pages are next to the packages, for people who read them as files.
    folders = (_PACKAGE / "docs", _PACKAGE.parent.parent / "docs")
    folder = next((each for each in folders if each.is_dir()), None)
    if folder is None:
        return {}
    files = sorted(folder.glob("**/*.md"))
    pages = {path.relative_to(folder).with_suffix("").as_posix(): path for path in files}
    for text in skill_texts():
        file = "" if text.file == _SKILL_FILE else f"/{text.file.removesuffix('.md')}"
        pages[f"skills/{text.skill}{file}"] = text.path
    return pages


def page_text(name: str) -> str:
    """Returns the text of a page; `name` may also be its file name (`docs/traces.md`).

    Raises InputError if there is no such page.
    """
    files = page_files()
    page = name.removeprefix("docs/").removesuffix(".md").removesuffix("/SKILL")
    if page not in files:
        raise InputError(
            f"the documentation has no page {name!r}{did_you_mean(page, list(files))}",
            f"read one of {', '.join(files)}"
            if files
            else "read the docs folder of the repository",
        )
    return files[page].read_text(encoding="utf-8")


def page_titles() -> dict[str, str]:
    """Returns the title of each page by its name."""
    texts = {name: path.read_text(encoding="utf-8") for name, path in page_files().items()}
    return {name: _title(text) for name, text in texts.items()}


def _title(text: str) -> str:
    """Returns the first heading of a page, which follows the front matter of a skill."""
    headings = (line for line in text.splitlines() if line.startswith("# "))
    return next(headings, "# ").removeprefix("# ")
