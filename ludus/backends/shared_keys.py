"""Recipe keys that ludus handles in the same way with every host of another framework."""

from __future__ import annotations

from functools import partial

from ludus.backends.hosts import Key, adapted, mapped, refused
from ludus.config.schema import RLConfig, RunConfig
from ludus.judges import JUDGES

SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}


def shared_rows(host: str, workers: str) -> list[Key]:
    """The rows of these keys.

    Args:
        host: its name, in notes.
        workers: its processes that play episodes, such as "verl's workers".
    """
    return [
        mapped("runs_dir", note="ludus, in the process of `ludus train`"),
        mapped("store", note="ludus, in the process of `ludus train`"),
        refused("mirror", f"{host}'s checkpoints are not copied to the mirror"),
        mapped("model.tokenizer", note=f"ludus renders and parses; {host} never tokenises"),
        mapped("model.chat_template", note="ludus renders and parses"),
        refused("model.tf32", f"{host} has no key for TF32", False),
        refused(
            "model.lora", "it keeps adapters in a form of its own, which ludus cannot read back"
        ),
        adapted("learner.share_prefixes", note="verl computes the prefix of each row by itself"),
        refused(
            "learner.detach_observations", "verl computes the gradients of all positions", False
        ),
        refused("learner.master_weights", "verl rounds to nearest", "float32"),
        mapped("env"),
        refused("agent", f"agents of the user's call the model over HTTP, which {workers} lack"),
        refused("roles", f"{host} trains one policy", {}),
        refused("policies", f"{host} trains one policy", {}),
        mapped("judge", fault=partial(judge_fault, workers)),
        mapped("tools"),
        mapped("limits"),
        mapped("tasks", note="ludus: readers, mixtures and their order, epoch by epoch"),
        refused("tasks.curriculum", f"the tasks of all steps are chosen before {host} starts"),
        mapped("rollout.format"),
        mapped("rollout.tool_calls"),
        mapped("rollout.markers"),
        mapped("rollout.system_prompt"),
        mapped("rollout.max_turns"),
        mapped("rollout.max_tokens_per_turn"),
        adapted("rollout.processes", note=f"without effect: {workers} play the episodes"),
        mapped("rollout.episode_deadline_s"),
        mapped("rollout.step_deadline_s"),
        mapped("rollout.max_retries"),
        adapted("rollout.deterministic", note="without effect: vLLM's batches depend on timing"),
        mapped("rollout.parts"),
        mapped("demonstrations", note=f"ludus, before {host} starts"),
        mapped("sft", note=f"ludus' local back end, before {host} starts"),
        refused("rl.steps_per_unused_sft_step", f"{host} is told its steps before SFT", 0.0),
        mapped("rl.horizon"),
        refused("rl.min_success_to_stop", f"{host} runs all of its steps"),
        refused("rl.min_signal", f"{host} runs all of its steps"),
        mapped("evaluate.num_tasks", note=f"ludus, before {host} starts and after it ends"),
        mapped("evaluate.before_sft", note=f"ludus, before {host} starts"),
        mapped("evaluate.confidence", note="ludus, in the process of `ludus train`"),
        refused("evaluate.roles", f"{host} trains one policy"),
        adapted("checkpoint.keep_best", note="of RL, the newest checkpoints are kept only"),
        refused("checkpoint.metric", "of RL, the newest checkpoints are kept only"),
        mapped("metrics", note="ludus, in the process of `ludus train`"),
        mapped("notify", note="ludus, in the process of `ludus train`"),
        refused("traces", f"spans of the episodes would be left in {workers}"),
        adapted(
            "budget",
            note=f"checked after each step; a stopped run goes on from {host}'s newest checkpoint",
        ),
        adapted("threads", note=f"OMP_NUM_THREADS of {host}'s processes; 0: 1 on a CPU"),
        refused("verify", "sampler and learner are different programs there", False),
        mapped("report", note="ludus, in the process of `ludus train`"),
    ]


def rl_of(config: RunConfig) -> RLConfig:
    """The section `rl`, or its defaults."""
    return config.rl or RLConfig()


def judge_fault(workers: str, config: RunConfig) -> str | None:
    """The reason to refuse a judge that sees all groups of a step."""
    if config.judge is not None and hasattr(JUDGES.load(config.judge.name), "score_groups"):
        return f"it scores the groups of a step together, and {workers} play them apart"
    return None


def schedule_fault(host: str, config: RunConfig) -> str | None:
    """The reason to refuse a schedule of the learning rate."""
    if rl_of(config).optimizer.schedule in ("linear", "wsd"):
        return f"{host} has the schedules constant and cosine"
    return None
