"""A demo world, a shop clerk, with tiny trained models that need no key, hub or GPU."""

from pathlib import Path

_MODELS = Path(__file__).parent / "models"

DEMO_MODELS = {
    "demo/teacher": _MODELS / "teacher",
    "demo/student": _MODELS / "student",
    "demo/other-student": _MODELS / "other-student",
}
"""The folders of the shipped models, by the name a user writes for them. The other student has a
tokenizer and a chat template of its own."""
