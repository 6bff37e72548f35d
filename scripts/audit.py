"""Audits code, dependencies and repository; fails on a finding that audit.toml does not justify.

    make audit                         all parts
    AUDIT_OFFLINE=1 make audit         accept that the advisories cannot be reached

code          bandit on ludus/, scripts/ and deploy/
advisories    pip-audit on constraints.txt. A pin that the service does not know was not checked, so
              the part fails; pip-audit itself would call it free of vulnerabilities
licences      of the installed packages of every extra, from their metadata: what is neither
              permissive nor justified fails
secrets       detect-secrets on the files of the repository
sbom          build/sbom.json, CycloneDX

Runs in .venv, whose packages it judges; the tools run in .venv-audit (see audit.sh).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from write_constraints import closure

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / ".venv-audit" / "bin"

PERMISSIVE = re.compile(
    r"\b(MIT|MIT-0|MIT-CMU|HPND|BSD|0BSD|Apache|ISC|PSF|Python Software Foundation|Python-2\.0|"
    r"CNRI-Python|Zlib|Unlicense|Public Domain|CC0|BSL|Boost)\b",
    re.I,
)
COPYLEFT = re.compile(
    r"\b(A?GPL|LGPL|MPL|EPL|CDDL|EUPL|Mozilla Public|(Lesser )?General Public)", re.I
)


@dataclass(frozen=True)
class Finding:
    """A problem: tool, rule, the file or package that has it, and a sentence."""

    part: str
    rule: str
    place: str
    text: str

    def __str__(self) -> str:
        return f"{self.part}: {self.place}: {self.rule}: {self.text}"


class Unchecked(Exception):
    """A part could not do its work; the message gives the reason."""


def code() -> list[Finding]:
    """Returns bandit's findings."""
    found = _json(["bandit", "-q", "-r", "ludus", "scripts", "deploy", "-f", "json"])
    return [
        Finding("code", item["test_id"], item["filename"].removeprefix("./"), item["issue_text"])
        for item in found["results"]
    ]


def advisories() -> list[Finding]:
    """Returns known vulnerabilities of the pinned versions. Errors: Unchecked."""
    asked = ["-r", "constraints.txt", "--no-deps", "--disable-pip", "-f", "json"]
    try:
        found = _json(["pip-audit", "--progress-spinner", "off", *asked])
    except Unchecked as error:
        raise Unchecked(f"the advisories cannot be reached: {error}") from error
    return advisory_findings(found["dependencies"])


def advisory_findings(packages: list[dict[str, Any]]) -> list[Finding]:
    """Returns the vulnerabilities in pip-audit's answer. Errors: Unchecked for skipped packages."""
    skipped = [item["name"] for item in packages if "skip_reason" in item]
    if skipped or not packages:
        raise Unchecked(
            f"the advisories cannot be reached: the service does not know {len(skipped)} of "
            f"{len(packages)} packages, e.g. {', '.join(skipped[:3])}"
        )
    findings = []
    for item in packages:
        for advisory in item["vulns"]:
            fixed = ", ".join(advisory["fix_versions"]) or "no version"
            text = f"{item['version']}, fixed in {fixed}"
            findings.append(Finding("advisories", advisory["id"], item["name"], text))
    return findings


def licences() -> list[Finding]:
    """Returns the packages of any extra whose licence is copyleft or unknown."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [name for name in project["optional-dependencies"] if name not in ("all", "dev")]
    owners: dict[str, list[str]] = {}
    for extra in ("", *extras):
        names, absent = closure(Requirement(f"ludus-rl[{extra}]" if extra else "ludus-rl"))
        for name in names.keys() - {"ludus-rl"}:
            owners.setdefault(name, []).append(extra or "core")
        if absent:
            names_absent = ", ".join(sorted(absent))
            print(f"licences: extra {extra}: not installed here, not judged: {names_absent}")
    findings = []
    for name, needed_by in sorted(owners.items()):
        text = licence_of(distribution(name))
        if (kind := kind_of(text)) != "permissive":
            where = "core" if "core" in needed_by else ", ".join(needed_by)
            findings.append(Finding("licences", kind, name, f"{text or 'none'} (extra: {where})"))
    print(f"licences: {len(owners)} packages")
    return findings


def licence_of(package: Distribution) -> str:
    """Returns the licence in a package's metadata, else the beginning of its licence file."""
    fields = package.metadata
    if expression := fields.get("License-Expression"):
        return str(expression)
    names = [
        line.rpartition(" :: ")[2]
        for line in fields.get_all("Classifier") or ()
        if line.startswith("License :: ") and line != "License :: OSI Approved"
    ]
    if named := ", ".join(names) or (fields.get("License") or "").strip().partition("\n")[0]:
        return named
    texts = [
        file for file in package.files or () if re.match(r"LICEN[CS]E|COPYING", file.name, re.I)
    ]
    return " ".join(texts[0].read_text().split())[:120] if texts else ""


def kind_of(text: str) -> str:
    """`permissive`, `copyleft` or `unknown`; an alternative ("MIT OR GPL") counts as the better."""
    for choice in re.split(r"\bOR\b", text):
        if PERMISSIVE.search(choice) and not COPYLEFT.search(choice):
            return "permissive"
    return "copyleft" if COPYLEFT.search(text) else "unknown"


def secrets() -> list[Finding]:
    """Returns what looks like a secret in the files of the repository."""
    found = _json(["detect-secrets", "scan"])
    return [
        Finding("secrets", item["type"], place, f"line {item['line_number']}")
        for place, items in found["results"].items()
        for item in items
    ]


def sbom() -> list[Finding]:
    """Write the bill of materials of .venv; it must list the core's dependencies."""
    path = ROOT / "build" / "sbom.json"
    path.parent.mkdir(exist_ok=True)
    options = ["--pyproject", "pyproject.toml", "--of", "JSON", "--output-reproducible"]
    _call(["cyclonedx-py", "environment", *options, "-o", str(path), sys.executable])
    listed = {
        canonicalize_name(item["name"]) for item in json.loads(path.read_text())["components"]
    }
    print(f"sbom: {path.relative_to(ROOT)}: {len(listed)} packages")
    missing = sorted(closure(Requirement("ludus-rl"))[0].keys() - listed - {"ludus-rl"})
    return [Finding("sbom", "missing", name, "is not in the list") for name in missing]


PARTS: dict[str, Callable[[], list[Finding]]] = {
    "code": code,
    "advisories": advisories,
    "licences": licences,
    "secrets": secrets,
    "sbom": sbom,
}


def judge(
    findings: Iterable[Finding], accepted: list[dict[str, str]], parts: Iterable[str]
) -> tuple[list[Finding], list[dict[str, str]]]:
    """Returns the findings that no entry accepts, and the entries of `parts` that accept none."""
    used: list[dict[str, str]] = []
    open_findings = []
    for finding in findings:
        matching = [
            entry
            for entry in accepted
            if (entry["part"], entry["rule"]) == (finding.part, finding.rule)
            and fnmatch(finding.place, entry.get("place", "*"))
        ]
        used += matching
        if not matching:
            open_findings.append(finding)
    done = set(parts)
    unused = [entry for entry in accepted if entry not in used and entry["part"] in done]
    return open_findings, [entry for entry in unused if not _is_absent(entry)]


def _is_absent(entry: dict[str, str]) -> bool:
    """True for the licence of a package that is not installed here: nothing was judged."""
    names = {canonicalize_name(item.metadata["Name"]) for item in distributions()}
    place = entry.get("place", "*")
    return entry["part"] == "licences" and not any(fnmatch(name, place) for name in names)


def read_accepted(path: Path) -> list[dict[str, str]]:
    """Returns the entries of audit.toml. Errors: SystemExit for an entry without a reason."""
    entries: list[dict[str, str]] = tomllib.loads(path.read_text())["accepted"]
    for entry in entries:
        if not entry.keys() >= {"part", "rule", "reason"} or len(entry["reason"]) < 20:
            raise SystemExit(f"{path.name}: {entry}: give part, rule and a reason in words")
    return entries


def main() -> int:
    os.chdir(ROOT)
    accepted = read_accepted(ROOT / "audit.toml")
    findings: list[Finding] = []
    unchecked: dict[str, str] = {}
    for name, part in PARTS.items():
        try:
            found = part()
        except Unchecked as error:
            unchecked[name] = str(error)
            continue
        findings += found
        print(f"{name}: {len(found)} findings", flush=True)
    remaining, stale = judge(findings, accepted, PARTS.keys() - unchecked.keys())
    for finding in remaining:
        print(f"NOT JUSTIFIED  {finding}")
    for entry in stale:
        print(f"STALE  audit.toml: {entry['part']} {entry['rule']} {entry.get('place', '*')}")
    for name, reason in unchecked.items():
        print(f"NOT CHECKED  {name}: {reason}")
    offline = os.environ.get("AUDIT_OFFLINE") == "1" and unchecked.keys() <= {"advisories"}
    failed = bool(remaining or stale or (unchecked and not offline))
    print(f"audit: {'failed' if failed else 'passed'}: {len(findings) - len(remaining)} justified, "
          f"{len(remaining)} not, {len(unchecked)} parts not checked")  # fmt: skip
    return int(failed)


def _call(command: list[str]) -> str:
    """Standard output of a tool. Errors: Unchecked where it fails without output."""
    command = [str(TOOLS / command[0]), *command[1:]]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and not done.stdout.strip():
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Unchecked(f"{Path(command[0]).name} exited with {done.returncode}: {last[:300]}")
    return done.stdout


def _json(command: list[str]) -> Any:
    return json.loads(_call(command))


if __name__ == "__main__":
    sys.exit(main())
