"""The documentation's pages, which skills and errors name, wherever the package is installed."""

from pathlib import Path

from stillroom.errors import InputError
from stillroom.validation import nearest

_PACKAGE = Path(__file__).parent.parent


def page_files() -> dict[str, Path]:
    """Returns the files of all pages by name, such as `traces`; none if they were not installed."""
    # In a checkout they lie beside the packages, for those who read them as files.
    folders = (_PACKAGE / "docs", _PACKAGE.parent.parent / "docs")
    folder = next((each for each in folders if each.is_dir()), None)
    if folder is None:
        return {}
    files = sorted(folder.glob("**/*.md"))
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in files}


def page_text(name: str) -> str:
    """Returns the text of a page, which may be named as a file is (`docs/traces.md`).

    Raises InputError if there is none of that name.
    """
    files = page_files()
    page = name.removeprefix("docs/").removesuffix(".md")
    if page not in files:
        raise InputError(
            f"the documentation has no page {name!r}{nearest(page, list(files))}",
            f"read one of {', '.join(files) or 'those of the repository (none is installed)'}",
        )
    return files[page].read_text(encoding="utf-8")


def page_titles() -> dict[str, str]:
    """Returns the title of each page by its name."""
    texts = {name: path.read_text(encoding="utf-8") for name, path in page_files().items()}
    return {name: text.partition("\n")[0].lstrip("# ") for name, text in texts.items()}
