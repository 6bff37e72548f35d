"""The report of a run: one self-contained HTML page."""

from ludus.report.page import ReportData, Rollout, write_report

__all__ = ["ReportData", "Rollout", "write_report"]
