"""The command `init`: a calibrated recipe for an environment or a data set."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ludus.cli.options import spec
from ludus.core.errors import ConfigError

app = typer.Typer()


@app.command()
def init(
    subject: Annotated[
        str,
        typer.Argument(
            help="An environment (a name, or FILE.py:Class), a file of questions and answers "
            "(.jsonl, .json, .parquet, .csv), or a data set on the hub."
        ),
    ],
    args: Annotated[
        list[str] | None,
        typer.Argument(help="Arguments of the environment or of the reader: key=value ..."),
    ] = None,
    tiers: Annotated[
        str | None, typer.Option(help="Levels to train on, separated by commas.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The recipe's file; default: NAME.yaml.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A pretrained model (folder or hub name); default: one from scratch."),
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=1, help="Minutes that the recipe's run may take on this machine.")
    ] = 10.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the trials and of the recipe.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Measure an environment or a data set, and write a recipe for it, in about two minutes."""
    from ludus.core.files import atomic_write
    from ludus.diagnostics.calibration.calibrate import calibrate
    from ludus.diagnostics.calibration.recipe import write, write_conversations
    from ludus.diagnostics.calibration.subject import open_subject

    chosen = [name.strip() for name in tiers.split(",")] if tiers else None
    found = open_subject(subject, spec(subject, args).args, chosen)
    path = out or Path(f"{found.name}.yaml")
    if path.exists() and not force:
        raise ConfigError(f"{path} exists: name another file with --out, or use --force")
    data = path.with_suffix(".sft.jsonl")
    if found.kind == "data" and data.exists() and not force:
        raise ConfigError(f"{data} exists: name another file with --out, or use --force")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(
            f"--out: {path} cannot be written: name a file in a folder that exists and is yours"
        )
    calibration = calibrate(
        found,
        minutes,
        seed,
        lambda text: typer.echo(text, err=True),
        model=model,
        data_file=str(data),
    )
    if (sft := calibration.config.sft) is not None and sft.data is not None:
        write_conversations(calibration.conversations, Path(sft.data))
    atomic_write(path, write(calibration))
    for warning in calibration.warnings:
        typer.echo(f"warning: {warning}", err=True)
    typer.echo(
        f"{path}: measured in {calibration.seconds:.0f} s; start it with: ludus train {path}"
    )
