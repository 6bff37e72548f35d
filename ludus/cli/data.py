"""Verbs that ask an endpoint or an expert: rollout, rubric, generate-data, augment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ludus.cli.options import env_specs, recipe_with_tools, spec

app = typer.Typer()


Model = Annotated[str | None, typer.Option(help="The model's name at the endpoint.")]
BaseUrl = Annotated[
    str | None, typer.Option(help="OpenAI-compatible endpoint, up to /v1. API key: LUDUS_API_KEY.")
]
Ids = Annotated[
    str | None, typer.Option(help="AgentGym ids, or seeds for other environments: 0-99,babyai_120.")
]
Form = Annotated[str, typer.Option(help="plain, react, or tools.")]
SystemPrompt = Annotated[
    Path | None, typer.Option(help="File with a system message, before the environment's messages.")
]
MaxRound = Annotated[
    int | None,
    typer.Option(min=1, help="Maximum turns of an episode; default: the environment's limit."),
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Maximum tokens of a turn.")]
Temperature = Annotated[float, typer.Option(min=0, help="0 is greedy.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the sampling.")]
Concurrency = Annotated[int, typer.Option(min=1, max=512, help="Episodes at the same time.")]


@app.command()
def rollout(
    env: Annotated[
        str, typer.Argument(help="A registered environment, FILE.py:Class, or module:Class.")
    ],
    args: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the environment: key=value ...")
    ] = None,
    model: Model = None,
    base_url: BaseUrl = None,
    ids: Ids = "0-9",
    tier: Annotated[str | None, typer.Option(help="Use the ids as seeds of this tier.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write all episodes to.")] = None,
    max_round: MaxRound = None,
    format: Annotated[
        str | None, typer.Option(help="plain, react, or tools; default: react.")
    ] = None,
    system_prompt: SystemPrompt = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 1.0,
    seed: Seed = 0,
    concurrency: Concurrency = 16,
    deadline: Annotated[
        float, typer.Option(min=0.1, help="Time limit of all episodes, in seconds.")
    ] = 3600.0,
    tools: Annotated[
        str | None,
        typer.Option(
            help="Recipe whose `tools` the episodes have, with its `limits` and "
            "`rollout.tool_calls`."
        ),
    ] = None,
) -> None:
    """Play episodes with the model of an OpenAI-compatible endpoint, as `POST /rollouts` does."""
    from ludus.data import options, rollouts
    from ludus.rollout.requests import parse_ids

    recipe = recipe_with_tools(tools)
    if format is None and recipe is not None and recipe.rollout.format == "code":
        format = "code"  # refused: the recipe's tools would be called in another way than trained
    asked = rollouts.request(
        env=env,
        model=model,
        base_url=base_url,
        ids=parse_ids(ids),
        tier=tier,
        max_round=max_round,
        format=format,
        system_prompt=options.text_of(system_prompt),
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        concurrency=concurrency,
        deadline_s=deadline,
    )
    answer, stop = rollouts.rollout(
        spec(env, args), asked, out, lambda line: typer.echo(line, err=True), recipe
    )
    typer.echo(answer.model_dump_json(exclude={"results"}))
    if stop is not None:
        raise stop
    if not answer.num_evaluated:
        raise typer.Exit(1)


@app.command()
def rubric(
    samples: Annotated[
        Path, typer.Argument(help="JSON lines: prompt, response, and, if known, answer and score.")
    ],
    out: Annotated[Path, typer.Option(help="YAML file to write; may not exist.")],
    model: Annotated[str, typer.Option(help="The model's name at the endpoint.")],
    base_url: Annotated[
        str, typer.Option(help="OpenAI-compatible endpoint, up to /v1. API key: LUDUS_API_KEY.")
    ],
    num_samples: Annotated[
        int, typer.Option(min=1, max=1000, help="Samples to show to the model: the first ones.")
    ] = 20,
    num_criteria: Annotated[
        int, typer.Option(min=1, max=50, help="Maximum number of criteria.")
    ] = 8,
) -> None:
    """Let a model write a rubric from samples, for the judge `rubric`."""
    from ludus.data.rubrics import write_rubric

    criteria = write_rubric(samples, model, base_url, out, num_samples, num_criteria)
    for criterion in criteria:
        typer.echo(f"{criterion.weight:+g} {criterion.name}: {criterion.text}")
    typer.echo(f"{len(criteria)} criteria: {out}")


@app.command("generate-data")
def generate_data(
    folder: Annotated[
        Path, typer.Argument(help="Folder of the data set; an unfinished data set is continued.")
    ],
    envs: Annotated[
        list[str],
        typer.Argument(help="Environments, each followed by its arguments: NAME key=value ..."),
    ],
    source: Annotated[str, typer.Option(help="expert, model, or mixed.")] = "expert",
    num_tasks: Annotated[int, typer.Option(min=1, help="Tasks per environment.")] = 100,
    first_seed: Annotated[int, typer.Option(min=0, help="Seed of the first task.")] = 0,
    tier: Annotated[list[str] | None, typer.Option(help="Only these tiers; default: all.")] = None,
    ids: Ids = None,
    items: Annotated[
        str | None, typer.Option(help="File of AgentEval or AgentTraj; use its tasks.")
    ] = None,
    format: Form = "react",
    system_prompt: SystemPrompt = None,
    model: Model = None,
    base_url: BaseUrl = None,
    samples: Annotated[int, typer.Option(min=1, help="Episodes of the model per task.")] = 4,
    keep: Annotated[int, typer.Option(min=1, help="Best episodes to keep per task.")] = 1,
    min_score: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Lowest score to keep; default: successes only."),
    ] = None,
    max_round: MaxRound = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 1.0,
    seed: Seed = 0,
    concurrency: Concurrency = 16,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes of the expert.")] = 2,
) -> None:
    """Generate SFT data from an expert's episodes, a model's best episodes, or both."""
    from ludus.data import options
    from ludus.data.generation import generate_dataset

    wanted = options.generation(
        env_specs(envs),
        source=source,
        num_tasks=num_tasks,
        first_seed=first_seed,
        tiers=tier,
        ids=ids,
        items=items,
        format=format,
        system_prompt=system_prompt,
        model=model,
        base_url=base_url,
        samples=samples,
        keep=keep,
        min_score=min_score,
        max_round=max_round,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        concurrency=concurrency,
        workers=workers,
    )
    num_kept = generate_dataset(wanted, folder, lambda line: typer.echo(line, err=True))
    typer.echo(f"{num_kept} episodes: {folder}/data.jsonl (card: {folder}/README.md)")


@app.command()
def augment(
    seeds: Annotated[Path, typer.Argument(help="JSON lines of seed tasks: prompt and answer.")],
    out: Annotated[
        Path, typer.Option(help="Folder to write; an unfinished augmentation is continued.")
    ],
    model: Annotated[str, typer.Option(help="Name of the model that writes the tasks.")],
    base_url: Annotated[
        str, typer.Option(help="OpenAI-compatible endpoint, up to /v1. API key: LUDUS_API_KEY.")
    ],
    num_tasks: Annotated[int, typer.Option(min=1, help="Tasks to keep.")] = 100,
    max_requests: Annotated[
        int | None, typer.Option(min=1, help="Requests at most; default: 10 a task.")
    ] = None,
    shots: Annotated[int, typer.Option(min=1, max=64, help="Seeds that a request shows.")] = 3,
    prompt: Annotated[str, typer.Option(help="Field of a seed's prompt.")] = "prompt",
    answer: Annotated[str, typer.Option(help="Field of a seed's answer.")] = "answer",
    num_seeds: Annotated[
        int | None, typer.Option(min=1, help="Use the first seeds only; default: all.")
    ] = None,
    instructions: Annotated[
        Path | None, typer.Option(help="File with further instructions to the writing model.")
    ] = None,
    judge: Annotated[str, typer.Option(help="Judge that has to accept a task's answer.")] = "math",
    judge_arg: Annotated[
        list[str] | None, typer.Option(help="Argument of the judge: key=value; repeatable.")
    ] = None,
    max_similarity: Annotated[
        float,
        typer.Option(min=0, max=1, help="Jaccard index of word 3-grams that makes a duplicate."),
    ] = 0.6,
    attempts: Annotated[
        int, typer.Option(min=0, max=1024, help="Attempts of the solver a task; 0: none.")
    ] = 0,
    solver_model: Annotated[
        str | None, typer.Option(help="Name of the solving model; default: --model.")
    ] = None,
    solver_base_url: Annotated[
        str | None, typer.Option(help="Its endpoint (API key: LUDUS_SOLVER_API_KEY); --base-url.")
    ] = None,
    solver_prompt: Annotated[
        Path | None, typer.Option(help="File with a system message for the solver.")
    ] = None,
    min_solved: Annotated[
        float, typer.Option(min=0, max=1, help="Lowest share of solved attempts to keep.")
    ] = 0.2,
    max_solved: Annotated[
        float, typer.Option(min=0, max=1, help="Highest share of solved attempts to keep.")
    ] = 0.8,
    temperature: Temperature = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of a text.")] = 1024,
    seed: Seed = 0,
    concurrency: Annotated[int, typer.Option(min=1, max=512, help="Requests at once.")] = 16,
) -> None:
    """Let a model write new tasks from seed tasks, and keep the valid and new ones."""
    from ludus.data import options
    from ludus.data.augmentation.augment import augment as augment_tasks

    wanted = options.augmentation(
        seeds,
        spec(judge, judge_arg),
        model=model,
        base_url=base_url,
        num_tasks=num_tasks,
        max_requests=10 * num_tasks if max_requests is None else max_requests,
        shots=shots,
        prompt=prompt,
        answer=answer,
        num_seeds=num_seeds,
        instructions=instructions,
        max_similarity=max_similarity,
        attempts=attempts,
        solver_model=solver_model,
        solver_base_url=solver_base_url,
        solver_prompt=solver_prompt,
        min_solved=min_solved,
        max_solved=max_solved,
        temperature=temperature,
        max_tokens=max_tokens,
        seed=seed,
        concurrency=concurrency,
    )
    num_kept = augment_tasks(wanted, out, lambda line: typer.echo(line, err=True))
    few = "" if num_kept == num_tasks else f" of {num_tasks}: --max-requests was reached"
    typer.echo(f"{num_kept} tasks{few}: {out}/tasks.jsonl (card: {out}/README.md)")
