"""lm-eval through the model service gives the verdicts of `ludus benchmark`, question by question.

lm-eval has its own task, prompt, extraction (a regular expression) and comparison (of texts).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from benchmark_samples import sample
from model_world import served, taught

from ludus.core.errors import ConfigError
from ludus.core.types import Message
from ludus.evaluate.benchmarks import BenchmarkResult
from ludus.pipeline.evaluation.benchmark import Request, benchmark_subjects
from ludus.pipeline.evaluation.subjects import EndpointSubject, FolderSubject
from ludus.tasks.benchmarks.reader import benchmark_tasks

MORE = [
    {"question": "A hen lays 3 eggs a day. How many in 14 days?", "answer": "3*14=42\n#### 42"},
    {"question": "Half of 90 seats are taken. How many are free?", "answer": "45\n#### 45"},
    {"question": "A book of 240 pages is read in 8 days. Pages a day?", "answer": "30\n#### 30"},
]
SAID = [
    "It is \\boxed{75}.",
    "First \\boxed{8}, no: \\boxed{20}.",
    "$1050$, so \\boxed{1,050}.",
    "\\boxed{43}",
    "I do not know.",
    "\\boxed{30}",
]
VERDICTS = [1.0, 1.0, 1.0, 0.0, 0.0, 1.0]
MAX_TOKENS = 40


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "gsm8k.jsonl"
    rows = [json.loads(line) for line in Path(sample("gsm8k")).read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *MORE]))
    return path


@pytest.fixture(scope="module")
def model(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder whose greedy answers are SAID."""
    tasks = benchmark_tasks("gsm8k", str(questions))
    answers = {
        task.prompt[0].content: Message(role="assistant", content=said)
        for task, said in zip(tasks, SAID, strict=True)
    }
    return taught(tmp_path_factory.mktemp("model") / "hf", answers)


def verdicts(result: BenchmarkResult) -> list[float]:
    assert result.evaluation is not None
    return [outcome.rewards[0] for outcome in result.evaluation.outcomes]


def lm_eval(folder: Path, questions: Path, model: str, args: Mapping[str, Any]) -> list[float]:
    """The verdicts of lm-eval, and its accuracy as the last one."""
    import lm_eval as harness
    from lm_eval.tasks import TaskManager

    task = {
        "task": "own_gsm8k",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(questions)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}\nPlease reason step by step, and put your final answer within "
        "\\boxed{}.",
        "doc_to_target": "{{answer.split('####')[-1].strip()}}",
        "generation_kwargs": {
            "until": ["<|endoftext|>"],
            "max_gen_toks": MAX_TOKENS,
            "do_sample": False,
            "temperature": 0.0,
        },
        "filter_list": [
            {
                "name": "boxed",
                "filter": [
                    {
                        "function": "regex",
                        "regex_pattern": "\\\\boxed\\{([^{}]*)\\}",
                        "group_select": -1,
                    },
                    {"function": "take_first"},
                ],
            }
        ],
        "metric_list": [
            {
                "metric": "exact_match",
                "aggregation": "mean",
                "higher_is_better": True,
                "regexes_to_ignore": [","],
            }
        ],
    }
    (folder / "own_gsm8k.yaml").write_text(yaml.safe_dump(task))
    done = harness.simple_evaluate(
        model=model,
        model_args={"model": "tiny", "num_concurrent": 1, "max_retries": 1, **args},
        tasks=["own_gsm8k"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        apply_chat_template=True,
        log_samples=True,
        bootstrap_iters=0,
    )
    rows = sorted(done["samples"]["own_gsm8k"], key=lambda row: row["doc_id"])
    accuracy = done["results"]["own_gsm8k"]["exact_match,boxed"]
    return [*(float(row["exact_match"]) for row in rows), accuracy]


def test_an_answer_longer_than_the_context_is_refused(model: Path, questions: Path) -> None:
    request = Request(on=["gsm8k"], data={"gsm8k": str(questions)}, max_tokens=3000)
    with pytest.raises(ConfigError, match=r"--max-tokens 3000: .* have 2048 tokens together"):
        benchmark_subjects([FolderSubject(model)], request)


@pytest.mark.slow
def test_lm_eval_gives_the_same_accuracy(model: Path, questions: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="`pip install 'ludus-rl[dev]'` installs it")
    request = Request(on=["gsm8k"], data={"gsm8k": str(questions)}, max_tokens=MAX_TOKENS)
    with served(model) as address:
        subjects = [FolderSubject(model), EndpointSubject("tiny", f"{address}/v1")]
        report = benchmark_subjects(subjects, request)
        chat = lm_eval(
            tmp_path,
            questions,
            "local-chat-completions",
            {"base_url": f"{address}/v1/chat/completions"},
        )
        completions = lm_eval(
            tmp_path,
            questions,
            "local-completions",
            {
                "base_url": f"{address}/v1/completions",
                "tokenizer": str(model),
                "max_length": 2048,
            },
        )
    folder, endpoint = map(verdicts, report.results)
    assert folder == VERDICTS, "the model has memorized SAID"
    assert endpoint == VERDICTS
    assert chat[:-1] == completions[:-1] == VERDICTS
    (mean, _) = (result.mean for result in report.results)
    assert mean is not None
    assert chat[-1] == completions[-1] == pytest.approx(mean.value)
