"""The demo: tasks of a shop clerk, and tiny trained models that need no key, hub or GPU."""

from pathlib import Path

_MODELS = Path(__file__).parent / "models"

DEMO_MODELS = {
    "demo/teacher": _MODELS / "teacher",
    "demo/student": _MODELS / "student",
    "demo/other-student": _MODELS / "other-student",
}
"""The folders of the demo models, by name. The other student has its own tokenizer and chat
template."""
