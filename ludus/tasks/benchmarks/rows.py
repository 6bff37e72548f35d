r"""The benchmarks, one row each: source, fields, prompt, judge, sampling.

Names, splits and fields are those of the data sets on the hub. Prompts and the extraction of
answers are those that the benchmarks' authors, or widely used evaluations, publish:

    maths       Qwen2.5-Math (Yang et al. 2024, arXiv:2409.12122): step by step, `\boxed{}`
    mmlu-pro    Wang et al. 2024, arXiv:2406.01574: "the answer is (X)"; without its five examples
    supergpqa   the authors' zero-shot prompt (arXiv:2502.14739): "Answer: $LETTER"
    gpqa        simple-evals (OpenAI): "Answer: $LETTER"
    bbeh        Kazemi et al. 2025, arXiv:2502.19187: "The answer is:"

AMC and AIME have few questions, so the mean of 32 sampled answers is reported; the others are
greedy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from ludus.core.types import Spec
from ludus.tasks.benchmarks.fields import Fields, Item, after_hashes, joined, letter


@dataclass(frozen=True, slots=True)
class Hub:
    """A split of a data set on the Hugging Face hub. `gated`: its owners want terms accepted."""

    path: str
    split: str
    config: str | None = None
    gated: bool = False

    def __str__(self) -> str:
        config = f", {self.config}" if self.config else ""
        return f"{self.path}{config}, {self.split}" + (" (gated)" if self.gated else "")


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A published benchmark.

    `size` is the number of rows as published. `{question}`, `{options}` and `{category}` in
    `prompt` are those of a row; `option` is the form of an option.
    """

    hub: Hub
    size: int
    licence: str
    fields: Fields
    prompt: str
    judge: Spec
    option: str = "{letter}) {text}"
    samples: int = 1
    temperature: float = 0.0

    def text(self, item: Item) -> str:
        """The prompt of an item."""
        values = {
            "question": item.question,
            "options": "\n".join(self._options(item.options)),
            "category": item.category or "the following subject",
        }
        return re.sub(r"\{(question|options|category)\}", lambda m: values[m[1]], self.prompt)

    def _options(self, options: Sequence[str]) -> list[str]:
        parts = zip(ascii_uppercase, options, strict=False)
        return [
            self.option.replace("{letter}", name).replace("{text}", text) for name, text in parts
        ]


BOXED = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."

MMLU_PRO = (
    "The following are multiple choice questions (with answers) about {category}. Think step by "
    'step and then finish your answer with "the answer is (X)" where X is the correct letter '
    "choice.\n\nQuestion:\n{question}\nOptions:\n{options}\nAnswer: Let's think step by step."
)

SUPERGPQA = (
    "Answer the following multiple choice question. There is only one correct answer. The last "
    "line of your response should be in the format 'Answer: $LETTER' (without quotes), where "
    "LETTER is one of A, B, C, D, E, F, G, H, I, or J.\n\n{question}\n{options}"
)

GPQA = (
    "Answer the following multiple choice question. The last line of your response should be of "
    "the following format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think "
    "step by step before answering.\n\n{question}\n\n{options}"
)

BBEH = (
    "{question}\n\nThink step by step, and when you provide the final answer, please use the "
    'prefix "The answer is:" without any modification, and provide the answer directly, with no '
    'formatting, no bolding, and no markup. For instance: "The answer is: 42" or "The answer is: '
    'yes". If the question is multiple choice with a single correct answer, the final answer must '
    'only be the letter corresponding to the correct answer. For example, "The answer is: (a)".'
)

MATH = Spec(name="math")
CHOICE = Spec(name="choice")
CONTEST = "not stated on the hub; problems of the MAA"

BENCHMARKS: dict[str, Benchmark] = {
    "math-500": Benchmark(
        hub=Hub("HuggingFaceH4/MATH-500", "test"),
        size=500,
        licence="MIT",
        fields=Fields(question=("problem",), category=("subject",), id=("unique_id",)),
        prompt=BOXED,
        judge=MATH,
    ),
    "gsm8k": Benchmark(
        hub=Hub("openai/gsm8k", "test", config="main"),
        size=1319,
        licence="MIT",
        fields=Fields(question=("question",), gold=after_hashes),
        prompt=BOXED,
        judge=MATH,
    ),
    "amc": Benchmark(
        hub=Hub("zwhe99/amc23", "test"),
        size=40,
        licence=CONTEST,
        fields=Fields(question=("question", "problem"), id=("id",)),
        prompt=BOXED,
        judge=MATH,
        samples=32,
        temperature=0.7,
    ),
    "aime-24": Benchmark(
        hub=Hub("HuggingFaceH4/aime_2024", "train"),
        size=30,
        licence=CONTEST,
        fields=Fields(question=("problem", "question"), id=("id",)),
        prompt=BOXED,
        judge=MATH,
        samples=32,
        temperature=0.7,
    ),
    "aime-25": Benchmark(
        hub=Hub("yentinglin/aime_2025", "train", config="default"),
        size=30,
        licence=CONTEST,
        fields=Fields(question=("problem", "question"), id=("id",)),
        prompt=BOXED,
        judge=MATH,
        samples=32,
        temperature=0.7,
    ),
    "minerva": Benchmark(
        hub=Hub("zwhe99/simplerl-minerva-math", "test"),
        size=272,
        licence="not stated on the hub; problems of MIT OpenCourseWare",
        fields=Fields(question=("problem", "question"), category=("type",)),
        prompt=BOXED,
        judge=MATH,
    ),
    "olympiadbench": Benchmark(
        hub=Hub("zwhe99/simplerl-OlympiadBench", "test"),
        size=675,
        licence="see the data set's card",
        fields=Fields(
            question=("question",),
            answer=("final_answer", "answer"),
            gold=joined,
            category=("subfield",),
            id=("id",),
        ),
        prompt=BOXED,
        judge=MATH,
    ),
    "mmlu-pro": Benchmark(
        hub=Hub("TIGER-Lab/MMLU-Pro", "test"),
        size=12_032,
        licence="MIT",
        fields=Fields(
            question=("question",),
            options=("options",),
            gold=letter,
            category=("category",),
            id=("question_id",),
        ),
        prompt=MMLU_PRO,
        option="{letter}. {text}",
        judge=CHOICE,
    ),
    "supergpqa": Benchmark(
        hub=Hub("m-a-p/SuperGPQA", "train"),
        size=26_529,
        licence="ODC-BY",
        fields=Fields(
            question=("question",),
            options=("options",),
            answer=("answer_letter",),
            gold=letter,
            category=("discipline",),
            id=("uuid",),
        ),
        prompt=SUPERGPQA,
        judge=CHOICE,
    ),
    "bbeh": Benchmark(
        hub=Hub("BBEH/bbeh", "train"),
        size=4520,
        licence="CC BY 4.0",
        fields=Fields(question=("input",), answer=("target",), category=("task",)),
        prompt=BBEH,
        judge=Spec(name="bbeh"),
    ),
    "gpqa": Benchmark(
        hub=Hub("Idavidrein/gpqa", "train", config="gpqa_diamond", gated=True),
        size=198,
        licence="CC BY 4.0; its authors ask not to publish the questions",
        fields=Fields(
            question=("Question",),
            options=(
                "Correct Answer",
                "Incorrect Answer 1",
                "Incorrect Answer 2",
                "Incorrect Answer 3",
            ),
            category=("High-level domain",),
            id=("Record ID",),
        ),
        prompt=GPQA,
        judge=CHOICE,
    ),
}
