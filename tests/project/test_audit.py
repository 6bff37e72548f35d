"""The audit's judgement: nothing unchecked, unjustified or out of date passes."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import ludus

ROOT = Path(ludus.__file__).parents[1]
WORKFLOWS = ROOT / ".github" / "workflows"


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit_script", ROOT / "scripts" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_advisories_that_cannot_be_reached_are_not_a_pass(audit: ModuleType) -> None:
    known: dict[str, Any] = {"name": "a", "version": "1", "vulns": []}
    assert audit.advisory_findings([known]) == []
    unknown = {"name": "b", "skip_reason": "not found"}
    with pytest.raises(audit.Unchecked, match=r"does not know 1 of 2 packages, e\.g\. b"):
        audit.advisory_findings([known, unknown])
    with pytest.raises(audit.Unchecked):
        audit.advisory_findings([])


def test_a_vulnerability_is_a_finding(audit: ModuleType) -> None:
    package = {"name": "a", "version": "1", "vulns": [{"id": "GHSA-1", "fix_versions": ["1.1"]}]}
    [finding] = audit.advisory_findings([package])
    assert (finding.rule, finding.place, finding.text) == ("GHSA-1", "a", "1, fixed in 1.1")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("MIT", "permissive"),
        ("Apache Software License", "permissive"),
        ("BSD-3-Clause AND MIT", "permissive"),
        ("MIT OR GPL-3.0-only", "permissive"),
        ("MPL-2.0 AND MIT", "copyleft"),
        ("GNU Library or Lesser General Public License (LGPL)", "copyleft"),
        ("GPL-3.0-only", "copyleft"),
        ("", "unknown"),
        ("Proprietary", "unknown"),
        ("Permitted by nobody", "unknown"),
    ],
)
def test_licences_by_kind(audit: ModuleType, text: str, kind: str) -> None:
    assert audit.kind_of(text) == kind


def test_unjustified_findings_and_stale_entries_fail(audit: ModuleType) -> None:
    def finding(rule: str, place: str) -> Any:
        return audit.Finding("code", rule, place, "x")

    entry = {"part": "code", "rule": "B1", "place": "ludus/a*.py", "reason": "r"}
    stale = {"part": "code", "rule": "B9", "reason": "r"}
    unreached = {"part": "advisories", "rule": "GHSA-1", "reason": "r"}
    absent = {"part": "licences", "rule": "copyleft", "place": "not-installed", "reason": "r"}
    findings = [
        finding("B1", "ludus/ab.py"),
        finding("B1", "ludus/b.py"),
        finding("B2", "ludus/a.py"),
    ]
    remaining, unused = audit.judge(
        findings, [entry, stale, unreached, absent], {"code", "licences"}
    )
    assert remaining == findings[1:]
    assert unused == [stale]


def test_every_entry_has_a_reason(audit: ModuleType, tmp_path: Path) -> None:
    assert audit.read_accepted(ROOT / "audit.toml")
    path = tmp_path / "audit.toml"
    path.write_text('[[accepted]]\npart = "code"\nrule = "B1"\nreason = "fine"\n')
    with pytest.raises(SystemExit, match="a reason in words"):
        audit.read_accepted(path)


def test_every_place_of_an_entry_has_files(audit: ModuleType) -> None:
    """The audit itself would call an entry for a file that has moved out of date."""
    for entry in audit.read_accepted(ROOT / "audit.toml"):
        if entry["part"] in ("code", "secrets"):
            place = entry.get("place", "*")
            assert any(ROOT.glob(place)), f"audit.toml: {entry['rule']}: no file {place}"


def test_licences_of_the_installed_packages_are_justified(audit: ModuleType) -> None:
    findings = audit.licences()
    assert {"pebble", "certifi"} <= {finding.place for finding in findings}
    assert audit.judge(findings, audit.read_accepted(ROOT / "audit.toml"), {"licences"}) == ([], [])


def test_the_workflows_audit_and_release() -> None:
    jobs = {
        path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
        for path in WORKFLOWS.glob("*.yml")
    }
    assert "make audit" in [step.get("run") for step in jobs["test"]["audit"]["steps"]]
    release = jobs["release"]
    assert set(release["publish"]["needs"]) == {"try", "test"}
    assert release["publish"]["permissions"] == {"id-token": "write"}
    assert release["test"]["uses"] == "./.github/workflows/test.yml"
    for path in WORKFLOWS.glob("*.yml"):
        for script in re.findall(r"scripts/[\w.-]+", path.read_text(encoding="utf-8")):
            assert (ROOT / script).is_file(), f"{path.name}: {script}"
