"""`ludus serve`: environments and models."""

from __future__ import annotations

from typing import Annotated

import typer

from ludus.cli.options import RunsDir, spec

app = typer.Typer(help="Services over HTTP and WebSocket.", no_args_is_help=True)


@app.command("env")
def serve_env(
    envs: Annotated[
        list[str],
        typer.Argument(help="Environments, each followed by its arguments: NAME [key=value ...]"),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Processes.")] = 1,
    isolate: Annotated[
        bool, typer.Option("--isolate", help="A process of its own for every session.")
    ] = False,
    max_sessions: Annotated[int, typer.Option(min=1, help="Open at the same time.")] = 4096,
    max_memory_mb: Annotated[
        int, typer.Option(min=0, help="No new session above this, in each process; 0: no limit.")
    ] = 0,
    idle: Annotated[float, typer.Option(min=1, help="Seconds until a session is closed.")] = 900.0,
    step_deadline: Annotated[float, typer.Option(min=0.1, help="Seconds of a step.")] = 30.0,
) -> None:
    """Serve environments: ludus' API, AgentGym's and OpenEnv's. Tokens: LUDUS_TOKENS=a,b."""
    from ludus.services import serving

    limits = {
        "max_sessions": max_sessions,
        "max_memory_mb": max_memory_mb,
        "idle_s": idle,
        "step_deadline_s": step_deadline,
    }
    specs = [spec(name, args) for name, args in serving.named(envs)]
    serving.serve_env(specs, host, port, workers, isolate, limits, typer.echo)


@app.command("model")
def serve_model(
    checkpoint: Annotated[
        str, typer.Argument(help="A run, a checkpoint's folder, or a Hugging Face folder.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    name: Annotated[
        str | None,
        typer.Option(help="The model's name to clients; default: the run's or folder's."),
    ] = None,
    sampler: Annotated[str, typer.Option(help="in_process or vllm.")] = "in_process",
    sampler_arg: Annotated[
        list[str] | None, typer.Option(help="An argument of the sampler: key=value; repeat it.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, or cuda:N; default: the run's, else cpu.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16; default: the run's or the weights'.")
    ] = None,
    context_length: Annotated[
        int | None, typer.Option(min=16, help="Most tokens of prompt and answer together.")
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="plain, qwen3, or a Jinja file; default: the model's own.")
    ] = None,
    thinking: Annotated[
        str | None, typer.Option(help="keep, strip or forbid; default: the run's, else keep.")
    ] = None,
    max_turns: Annotated[int, typer.Option(min=1, help="Sampled at the same time.")] = 512,
    runs_dir: RunsDir = "runs",
) -> None:
    """Serve a model over OpenAI's API. Tokens: LUDUS_TOKENS=a,b; to swap: LUDUS_ADMIN_TOKEN."""
    from ludus.services import serving

    overrides = {
        "device": device,
        "dtype": dtype,
        "context_length": context_length,
        "chat_template": chat_template,
        "thinking": thinking,
    }
    serving.serve_model(
        checkpoint,
        host=host,
        port=port,
        name=name,
        runs_dir=runs_dir,
        overrides=overrides,
        sampler=spec(sampler, sampler_arg),
        max_turns=max_turns,
        say=typer.echo,
    )
