"""Task readers, train/held-out splits, mixtures and curricula."""

from ludus.config.registry import Registry, Row
from ludus.core.types import Task

READERS: Registry[list[Task]] = Registry(
    "reader",
    {
        "agentgym": Row("ludus.tasks.agentgym:read_agentgym", "", "the items of AgentGym's files"),
        "agentjet": Row(
            "ludus.tasks.agentjet:read_agentjet", "remote", "the tasks of an AgentJet service"
        ),
        "benchmark": Row(
            "ludus.tasks.benchmarks.reader:read_benchmark", "", "a published benchmark, by name"
        ),
        "cuda_engineer_archive": Row(
            "ludus.tasks.kernels.reader:read_archive",
            "",
            "the AI CUDA Engineer Archive: KernelBench's problems with kernels",
        ),
        "env": Row("ludus.tasks.readers:read_env", "", "tasks that the environment makes"),
        "generated_kernels": Row(
            "ludus.tasks.kernels.generated:read_generated", "", "problems of GPU kernels, by seed"
        ),
        "hf": Row("ludus.tasks.readers:read_hf", "data", "a Hugging Face data set, local or hub"),
        "json": Row("ludus.tasks.readers:read_json", "", "a file of JSON lines"),
        "kernelbench": Row(
            "ludus.tasks.kernels.reader:read_kernelbench", "", "KernelBench: GPU kernels to write"
        ),
        "mixture": Row("ludus.tasks.mixture:read_mixture", "", "several readers, in exact ratios"),
        "prompts": Row("ludus.tasks.prompts:read_prompts", "", "constant prompts, repeated"),
    },
    context=frozenset({"maker", "on_bad_line", "place", "skipped_by", "taken"}),
)
"""A reader is a function from a config's arguments to a list of tasks. `context` holds the
arguments that `read_tasks` supplies."""
