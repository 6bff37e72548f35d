"""`ludus serve`: environments, models, tools, the sandbox, evaluation."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ludus.cli.options import RunsDir, env_specs, named_specs, recipe_with_tools, spec
from ludus.core.errors import ConfigError

MaxConnections = Annotated[
    int, typer.Option(min=16, help="Maximum number of connections, per process.")
]
MaxPerAddress = Annotated[
    int,
    typer.Option(
        "--max-connections-per-address", min=1, help="Of those, connections of one address."
    ),
]

app = typer.Typer(help="Services over HTTP and WebSocket.", no_args_is_help=True)


@app.command("env")
def serve_env(
    envs: Annotated[
        list[str],
        typer.Argument(help="Environments, each followed by its arguments: NAME key=value ..."),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8000,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Worker processes.")] = 1,
    isolate: Annotated[
        bool, typer.Option("--isolate", help="Run each session in its own process.")
    ] = False,
    max_sessions: Annotated[
        int, typer.Option(min=1, help="Maximum number of open sessions.")
    ] = 4096,
    max_sessions_per_token: Annotated[
        int,
        typer.Option(
            min=0,
            help="Sessions of one token, or without tokens of one address; 0: an equal share.",
        ),
    ] = 0,
    max_memory_mb: Annotated[
        int,
        typer.Option(min=0, help="Open no session above this memory, per process; 0: no limit."),
    ] = 0,
    idle: Annotated[
        float, typer.Option(min=1, help="Seconds until an idle session is closed.")
    ] = 900.0,
    step_deadline: Annotated[
        float, typer.Option(min=0.1, help="Seconds that a step may take.")
    ] = 30.0,
    expert_deadline: Annotated[
        float, typer.Option(min=0.1, help="Seconds that a call of the expert may take.")
    ] = 150.0,
    drain: Annotated[
        float,
        typer.Option(min=0, help="Seconds that open sessions have to finish after SIGTERM."),
    ] = 0.0,
    max_connections: MaxConnections = 8192,
    max_per_address: MaxPerAddress = 4096,
    tools: Annotated[
        str | None,
        typer.Option(
            help="Recipe whose `tools` the episodes of POST /rollouts have, with its `limits` and "
            "`rollout.tool_calls`."
        ),
    ] = None,
) -> None:
    """Serve environments over the APIs of ludus, AgentGym and OpenEnv. Tokens: LUDUS_TOKENS=a,b."""
    from ludus.services.envs.manager import SessionLimits
    from ludus.services.envs.service import serve_envs
    from ludus.services.server.auth import client_tokens
    from ludus.services.server.connections import ConnectionLimits
    from ludus.services.server.serve import ServeOptions

    limits = SessionLimits(
        max_sessions=max_sessions,
        max_sessions_per_token=max_sessions_per_token,
        max_memory_mb=max_memory_mb,
        idle_s=idle,
        step_deadline_s=step_deadline,
        expert_deadline_s=expert_deadline,
    )
    connections = ConnectionLimits(max_connections, max_per_address)
    options = ServeOptions(host, port, workers, client_tokens(), connections, drain)
    recipe = recipe_with_tools(tools)
    serve_envs(env_specs(envs), options, limits, isolate, typer.echo, recipe)


@app.command("model")
def model(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="A run, RUN/CHECKPOINT (RUN/best), a checkpoint folder, or a Hugging Face folder."
        ),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8000,
    name: Annotated[
        str | None,
        typer.Option(help="The model's name for clients; default: the run's or folder's."),
    ] = None,
    sampler: Annotated[str, typer.Option(help="in_process, exact, vllm or sglang.")] = "in_process",
    sampler_arg: Annotated[
        list[str] | None, typer.Option(help="A sampler argument, key=value; repeatable.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, or cuda:N; default: the run's, else cpu.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16; default: the run's or the weights'.")
    ] = None,
    context_length: Annotated[
        int | None, typer.Option(min=16, help="Maximum tokens of prompt plus answer.")
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="plain, qwen3, or a Jinja file; default: the model's own.")
    ] = None,
    thinking: Annotated[
        str | None, typer.Option(help="keep, strip or forbid; default: the run's, else keep.")
    ] = None,
    max_turns: Annotated[
        int, typer.Option(min=1, help="Maximum number of concurrent generations.")
    ] = 512,
    max_turns_per_token: Annotated[
        int,
        typer.Option(
            min=0, help="Of those, of one token, or without tokens of one address; 0: equal share."
        ),
    ] = 0,
    max_connections: MaxConnections = 8192,
    max_per_address: MaxPerAddress = 4096,
    runs_dir: RunsDir = "runs",
    challenger: Annotated[
        str | None,
        typer.Option(help="A/B roll-out: a checkpoint that may replace the served one."),
    ] = None,
    rollout_log: Annotated[
        str | None,
        typer.Option(
            help="The roll-out's log; an existing one goes on. "
            "Default: rollout-A-B.jsonl in runs-dir."
        ),
    ] = None,
    shares: Annotated[
        str | None,
        typer.Option(help="Challenger's shares of sessions in %, by step; default: 5,10,25,50."),
    ] = None,
    min_samples: Annotated[
        int | None,
        typer.Option(help="Challenger's scored sessions before the next step; default: 50."),
    ] = None,
    step_time: Annotated[
        float | None, typer.Option(help="Seconds that a step lasts at least; default: 300.")
    ] = None,
    max_samples: Annotated[
        int | None,
        typer.Option(help="Challenger's scored sessions until the champion stays; default: 10000."),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(help="Probability of a wrong end of an equal challenger; default: 0.05."),
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(help="Loss of mean score that the challenger may have; default: 0."),
    ] = None,
    max_error_increase: Annotated[
        float | None,
        typer.Option(help="Increase of the share of failed requests; default: 0.01."),
    ] = None,
    max_latency_ratio: Annotated[
        float | None,
        typer.Option(help="Factor by which requests may take longer; default: 1.5."),
    ] = None,
    feedback_time: Annotated[
        float | None,
        typer.Option(help="Seconds in which an answer can be scored; default: 86400."),
    ] = None,
    answer_time: Annotated[
        float | None,
        typer.Option(
            help="Seconds after which a request without a whole answer has failed; default: 300."
        ),
    ] = None,
) -> None:
    """Serve a model over OpenAI's API. Tokens: LUDUS_TOKENS=a,b; for swaps: LUDUS_ADMIN_TOKEN."""
    from ludus.services.model.policy import ModelOverrides
    from ludus.services.model.serving import challenge_of, serve_model
    from ludus.services.server.connections import ConnectionLimits

    overrides: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "context_length": context_length,
        "chat_template": chat_template,
        "thinking": thinking,
    }
    rollout = {
        "rollout_log": rollout_log,
        "shares": shares,
        "min_samples": min_samples,
        "step_time": step_time,
        "max_samples": max_samples,
        "alpha": alpha,
        "margin": margin,
        "max_error_increase": max_error_increase,
        "max_latency_ratio": max_latency_ratio,
        "feedback_time": feedback_time,
        "answer_time": answer_time,
    }
    serve_model(
        checkpoint,
        host=host,
        port=port,
        name=name,
        runs_dir=runs_dir,
        overrides=ModelOverrides(**overrides),
        sampler=spec(sampler, sampler_arg),
        max_turns=max_turns,
        max_turns_per_token=max_turns_per_token,
        connections=ConnectionLimits(max_connections, max_per_address),
        say=typer.echo,
        challenge=challenge_of(challenger, rollout),
    )


@app.command("tools")
def tools(
    tools: Annotated[
        list[str],
        typer.Argument(help="Tools, each followed by its arguments: NAME key=value ..."),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 5000,
    max_trajectories: Annotated[
        int, typer.Option(min=1, help="Maximum number of trajectories with state.")
    ] = 4096,
    max_concurrent: Annotated[
        int, typer.Option(min=1, help="Maximum number of concurrent actions.")
    ] = 64,
    idle: Annotated[
        float, typer.Option(min=1, help="Seconds until an idle trajectory's state is released.")
    ] = 900.0,
    deadline: Annotated[float, typer.Option(min=0.1, help="Seconds that a call may take.")] = 60.0,
    max_connections: MaxConnections = 8192,
    max_per_address: MaxPerAddress = 4096,
) -> None:
    """Serve tools over verl-tool's protocol (POST /get_observation). Tokens: LUDUS_TOKENS=a,b."""
    from ludus.services.server.auth import client_tokens
    from ludus.services.server.connections import ConnectionLimits
    from ludus.services.server.serve import ServeOptions
    from ludus.services.tools.service import ToolLimits, serve_tools

    limits = ToolLimits(max_trajectories, max_concurrent, idle, deadline)
    connections = ConnectionLimits(max_connections, max_per_address)
    options = ServeOptions(host, port, 1, client_tokens(), connections)
    serve_tools(named_specs(tools, "a tool"), options, limits, typer.echo)


@app.command("sandbox")
def sandbox(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Arguments of the sandbox `jail`: key=value ..."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8080,
    max_run: Annotated[
        float, typer.Option(min=0.1, help="Most seconds that a request may ask for.")
    ] = 120.0,
    max_memory_mb: Annotated[
        int, typer.Option(min=16, help="Most memory that a request may ask for.")
    ] = 4096,
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Maximum number of runs, those that wait included.")
    ] = 1024,
    max_connections: MaxConnections = 8192,
    max_per_address: MaxPerAddress = 4096,
) -> None:
    """Run untrusted code over SandboxFusion's API (POST /run_code). Tokens: LUDUS_TOKENS=a,b."""
    from ludus.services.sandbox.service import SandboxLimits, serve_sandbox
    from ludus.services.server.auth import client_tokens
    from ludus.services.server.connections import ConnectionLimits
    from ludus.services.server.serve import ServeOptions

    limits = SandboxLimits(max_run, max_memory_mb, min(512, max_memory_mb), max_waiting)
    connections = ConnectionLimits(max_connections, max_per_address)
    options = ServeOptions(host, port, 1, client_tokens(), connections)
    serve_sandbox(spec("jail", arguments), options, limits, typer.echo)


@app.command("evaluation")
def evaluation(
    judges: Annotated[
        str, typer.Option(help="Judges that clients may name, separated by commas; see --config.")
    ] = "answer,choice,math,qa",
    config: Annotated[
        str | None,
        typer.Option(help="YAML file of further judges, with arguments of yours: an endpoint's."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8100,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Worker processes.")] = 1,
    deadline: Annotated[
        float, typer.Option(min=0.001, help="Seconds of a request that names no deadline.")
    ] = 30.0,
    max_deadline: Annotated[
        float, typer.Option(min=0.001, help="Most seconds that a request may ask for.")
    ] = 300.0,
    max_items: Annotated[int, typer.Option(min=1, help="Outputs in a request.")] = 4096,
    max_chars: Annotated[
        int, typer.Option(min=1, help="Characters of an output with its truth, prompt and data.")
    ] = 100_000,
    max_pending_mb: Annotated[
        int, typer.Option(min=1, help="Characters of all requests under way, in millions.")
    ] = 128,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Size of a request.")] = 16,
    max_judges: Annotated[
        int, typer.Option(min=1, help="Judges with arguments of clients, one for each set.")
    ] = 16,
    max_connections: MaxConnections = 8192,
    max_per_address: MaxPerAddress = 4096,
) -> None:
    """Score outputs of models with judges (POST /evaluate). Tokens: LUDUS_TOKENS=a,b."""
    from ludus.services.evaluation.config import served_judges
    from ludus.services.evaluation.evaluator import EvaluationLimits
    from ludus.services.evaluation.service import serve_evaluation
    from ludus.services.server.auth import client_tokens
    from ludus.services.server.connections import ConnectionLimits
    from ludus.services.server.serve import ServeOptions

    if deadline > max_deadline:
        raise ConfigError(f"--deadline {deadline:g} exceeds --max-deadline, {max_deadline:g}")
    limits = EvaluationLimits(
        max_items=max_items,
        max_chars=max_chars,
        max_pending_chars=max_pending_mb * 1_000_000,
        max_judges=max_judges,
        deadline_s=deadline,
        max_deadline_s=max_deadline,
        max_body_bytes=max_body_mb * 1_000_000,
    )
    connections = ConnectionLimits(max_connections, max_per_address)
    options = ServeOptions(host, port, workers, client_tokens(), connections)
    serve_evaluation(served_judges(judges, config), options, limits, typer.echo)
