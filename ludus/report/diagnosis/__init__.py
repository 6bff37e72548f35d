"""Diagnosis of a run from its metrics: what keeps it from learning, and what to change."""

from ludus.report.diagnosis.diagnosis import Diagnosis, diagnose, read_findings
from ludus.report.diagnosis.findings import Finding

__all__ = ["Diagnosis", "Finding", "diagnose", "read_findings"]
