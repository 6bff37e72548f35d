"""Ablations of a co-evolution: conditions times seeds, and their page.

    python benchmarks/coevolve.py run --out DIR --conditions full grpo --seeds 0 1 2 --jobs 2
    python benchmarks/coevolve.py page --out DIR

`run` makes one co-evolution `CONDITION-seedN` in DIR for each pair, each in a process with one
thread, and resumes those that are there; its output is in DIR/CONDITION-seedN.log. The first run
of a seed (`start`) is the same in all conditions, so it is made once and copied. `page` writes
`docs/benchmarks/<recipe>.md`, `.svg` and `.json` from what is there, finished or not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import coevolve_page
from common import RESULTS

from ludus.coevolve.storage import Storage
from ludus.core.files import atomic_folder

CONDITIONS: dict[str, tuple[str, ...]] = {
    "full": (),
    "no-uncertainty": ("reward.uncertainty=0",),
    "no-tool": ("reward.tool=0",),
    "no-repetition": ("reward.repetition=0",),
    "grpo": ("executor.rl.algorithm=grpo",),
    "scale-alone": ("executor.rl.algorithm={name: adpo, args: {dynamic_clip: false}}",),
    "clip-alone": ("executor.rl.algorithm={name: adpo, args: {scale_advantages: false}}",),
    "fixed": ("curriculum.rl=null",),
}
"""By condition, the settings that differ from the recipe. None of them is one of `start`."""

DEFAULT = ("full", "no-uncertainty", "no-tool", "no-repetition", "grpo", "fixed")


@dataclass(frozen=True, slots=True)
class Job:
    """The co-evolution of a condition and a seed."""

    condition: str
    seed: int
    recipe: str
    out: Path
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.condition}-seed{self.seed}"

    @property
    def storage(self) -> Storage:
        return Storage(self.out / self.name)

    def command(self, *stage: str) -> list[str]:
        """The command line of a stage, or of all that are not complete."""
        settings = [f"name={self.name}", f"seed={self.seed}", *CONDITIONS[self.condition]]
        words = ["coevolve", self.recipe, *stage, *settings, *self.overrides]
        return [sys.executable, "-m", "ludus", *words, "--storage", str(self.out)]

    def run(self, *stage: str) -> str:
        """Run it with one thread. Returns the last line of its log where it failed, else ""."""
        log = self.out / f"{self.name}.log"
        threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        with log.open("ab") as file:
            done = subprocess.run(
                self.command(*stage),
                env={**os.environ, **threads},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        if done.returncode == 0:
            return ""
        lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
        return f"exit code {done.returncode}: {lines[-1]}"


def run_all(jobs: Sequence[Job], at_once: int) -> dict[str, str]:
    """Run all jobs, `at_once` at a time. Returns the faults by name."""
    first = {job.seed: job for job in reversed(jobs)}
    with ThreadPoolExecutor(at_once) as pool:
        new = [job for job in first.values() if "start" not in job.storage.complete()]
        faults = dict(zip(new, pool.map(lambda job: job.run("start"), new), strict=True))
        broken = {job.seed for job, fault in faults.items() if fault}
        ready = [job for job in jobs if job.seed not in broken]
        for job in ready:
            share_start(first[job.seed].storage, job.storage)
        found = {job: fault for job, fault in faults.items() if fault}
        for job, fault in zip(ready, pool.map(lambda job: job.run(), ready), strict=True):
            print(f"{job.name}: {fault or 'complete'}", flush=True)
            if fault:
                found[job] = fault
    return {job.name: fault for job, fault in found.items()}


def share_start(source: Storage, target: Storage) -> None:
    """Copy the first run's model, and note the stage, with its seconds, as complete."""
    if "start" in target.complete():
        return
    with atomic_folder(target.model("start")) as folder:
        shutil.copytree(source.model("start"), folder, dirs_exist_ok=True)
    target.record("start", source.complete()["start"])


def main() -> None:
    """Parse the command line, and run or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    run, page = verbs.add_parser("run"), verbs.add_parser("page")
    run.add_argument("--recipe", default="coevolve-tiny", help="a YAML file, or a recipe's name")
    run.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=DEFAULT)
    run.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    run.add_argument("--jobs", type=int, default=1, help="co-evolutions at the same time")
    run.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", dest="overrides")
    page.add_argument("--name", default="coevolve-tiny", help="of the recipe, and of the page")
    page.add_argument("--note", default="", help="a paragraph for the page")
    page.add_argument("--docs", type=Path, default=RESULTS, help="folder of the page")
    for verb in (run, page):
        verb.add_argument("--out", type=Path, required=True, help="folder of the co-evolutions")
    args = parser.parse_args()
    if args.verb == "page":
        print(coevolve_page.publish(args.out, args.docs, args.name, args.note, list(CONDITIONS)))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    given = args.recipe, args.out, tuple(args.overrides)
    # Seed by seed, so that all conditions have one before any has two.
    jobs = [Job(condition, seed, *given) for seed in args.seeds for condition in args.conditions]
    if faults := run_all(jobs, max(args.jobs, 1)):
        sys.exit("\n".join(f"{name}: {fault}" for name, fault in faults.items()))


if __name__ == "__main__":
    main()
