"""Cells of a notebook, run one after the other in one interpreter: SandboxFusion's `/run_jupyter`.

    {"cells": ["a = 1", "a", "print(a)", "1 / 0"]}
        -> {"status": "Success", "cells": [..., {"display": [{"text/plain": "1"}], ...}, ...]}

As there, a cell that raises does not end the others, and makes no failure. There is no Jupyter in
the sandbox: `display` has the text of a cell's last expression, without pictures, and cells have no
magics (`%time`) and no `await` outside functions.
"""

from __future__ import annotations

import base64
import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Literal

from pydantic import BaseModel, Field, ValidationError

from ludus.sandbox.base import Code, Limits, RunResult, RunStatus, Sandbox
from ludus.services.sandbox.results import CommandResult, command_result

FOUND = ".ludus-cell.json"
"""File in the working folder with the display and the error of the cell that has run."""

RUN_CELL = """\
def _ludus_run(text, number, found):
    import ast, json, linecache, traceback
    name, said, namespace = f"<cell {number}>", {"display": [], "error": []}, globals()
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    try:
        tree, value = ast.parse(text, name), None
        shown = tree.body and isinstance(tree.body[-1], ast.Expr) and text.rstrip()[-1:] != ";"
        last = ast.Expression(tree.body.pop().value) if shown else None
        exec(compile(tree, name, "exec"), namespace)
        if last is not None:
            value = eval(compile(last, name, "eval"), namespace)
        if value is not None:
            said["display"].append({"text/plain": repr(value)})
    except BaseException as error:
        told = traceback.format_exception(error)
        if isinstance(error, SyntaxError):
            told = traceback.format_exception_only(error)
        told = [line for line in told if "in _ludus_run" not in line]
        try:
            value = str(error)
        except Exception:
            value = ""
        said["error"].append({"ename": type(error).__name__, "evalue": value, "traceback": told})
    with open(found, "w") as file:
        json.dump(said, file)
"""
"""Defines the function that runs a cell in the sandbox."""


class RunJupyter(BaseModel):
    """SandboxFusion's request; `cell_timeout` 0 is none beside `total_timeout`."""

    cells: list[str] = Field(max_length=1000)
    cell_timeout: float = Field(0, ge=0, allow_inf_nan=False)
    total_timeout: float = Field(45, gt=0, allow_inf_nan=False)
    kernel: Literal["python3"] = "python3"
    files: dict[str, str | None] = Field(default_factory=dict, max_length=1000)
    fetch_files: list[str] = Field(default_factory=list, max_length=1000)


class Said(BaseModel):
    """The value of a cell's last expression, and what the cell raised."""

    display: list[dict[str, str]] = Field(default_factory=list)
    error: list[dict[str, str | list[str]]] = Field(default_factory=list)


class Cell(Said):
    """A cell's end."""

    stdout: str = ""
    stderr: str = ""


class RunJupyterAnswer(BaseModel):
    """SandboxFusion's answer. A cell that ends the interpreter is the last one."""

    status: str
    message: str = ""
    driver: CommandResult | None = None
    cells: list[Cell] = Field(default_factory=list)
    executor_pod_name: str | None = None
    files: dict[str, str] = Field(default_factory=dict)


async def run_cells(
    sandbox: Sandbox, body: RunJupyter, files: Mapping[str, bytes], limits: Limits
) -> RunJupyterAnswer:
    """Run cells; `limits.output_bytes` holds for all together.

    Errors: ConfigError, ToolError, as `Sandbox.run`.
    """
    session, began = uuid.uuid4().hex, time.monotonic()
    answer = RunJupyterAnswer(status="Success", executor_pod_name=socket.gethostname())
    left_bytes = limits.output_bytes
    try:
        first = Code(RUN_CELL, files=files)
        result = await sandbox.run(
            first, replace(limits, run_s=body.total_timeout), session=session
        )
        for number, text in enumerate(body.cells, 1):
            left_s = body.total_timeout - (time.monotonic() - began)
            bounds = replace(
                limits,
                run_s=max(0.001, min(left_s, body.cell_timeout or left_s)),
                output_bytes=max(1, left_bytes),
            )
            call = f"_ludus_run({text!r}, {number}, {FOUND!r})"
            result = await sandbox.run(Code(call, fetch=[FOUND]), bounds, session=session)
            cell, num_bytes = _cell(result)
            if num_bytes > left_bytes:
                cell, result = Cell(), replace(result, status=RunStatus.OUTPUT_LIMIT)
            answer.cells.append(cell)
            left_bytes -= num_bytes
            if result.status is not RunStatus.FINISHED:
                break
        if result.status is RunStatus.FINISHED and body.fetch_files:
            result = await sandbox.run(Code("", fetch=body.fetch_files), limits, session=session)
            answer.files = {
                name: base64.b64encode(data).decode() for name, data in result.files.items()
            }
    finally:
        await sandbox.close_session(session)
    answer.status = "Success" if result.status is RunStatus.FINISHED else "Failed"
    answer.driver = command_result(result)
    answer.driver.stdout = answer.driver.stderr = ""  # the cells have it
    answer.driver.execution_time = time.monotonic() - began
    return answer


def _cell(result: RunResult) -> tuple[Cell, int]:
    """A cell, and the bytes of it."""
    text = result.files.get(FOUND, b"")
    num_bytes = len(result.stdout) + len(result.stderr) + len(text)
    said = Said()
    if result.status is RunStatus.FINISHED:
        with suppress(ValidationError):  # code may write the file too
            said = Said.model_validate_json(text)
    cell = Cell(stdout=result.stdout, stderr=result.stderr, display=said.display, error=said.error)
    return cell, num_bytes
