"""The one table of all formats that can be imported."""

from stillroom.importing.records import TraceFormat

FORMATS: tuple[TraceFormat, ...] = ()
"""All formats; the first one that recognises a file reads it, so the particular come first."""
