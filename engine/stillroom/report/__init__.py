"""The report: one self-contained HTML page about all runs of a workspace."""

from stillroom.report.write import write_report

__all__ = ["write_report"]
