"""Static analysis of CUDA C++: safety, correctness and performance, as findings."""

from ludus.kernels.analysis.analyse import analyse
from ludus.kernels.analysis.findings import RULES, Analysis, Finding, Severity

__all__ = ["RULES", "Analysis", "Finding", "Severity", "analyse"]
