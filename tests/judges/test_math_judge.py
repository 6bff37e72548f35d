"""The judge `math`, with the real math-verify in real worker processes."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest
from judged import said
from variants import variants

from ludus.core.errors import Unscorable
from ludus.core.types import Task
from ludus.judges.math import MathJudge
from ludus.judges.workers.pool import Workers


@pytest.fixture(scope="module")
def judge():
    return MathJudge(workers=1)


@pytest.fixture(scope="module")
def hasty():
    return MathJudge(workers=1, limit_s=0.5)


async def judged(judge, text, answer):
    return await judge(Task(id="q", answer=answer), said(text))


@pytest.mark.parametrize(("text", "value"), [("<a>8</a>", 1.0), ("<a>9</a> not 8", 0.0)])
async def test_markers_of_the_recipe(text, value):
    judge = MathJudge(workers=1, markers=("<a>", "</a>"))
    try:
        assert (await judged(judge, text, "8")).value == value
    finally:
        await judge.close()


MATRIX = "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}"
EQUAL = [
    ("\\boxed{\\frac{1}{2}}", "0.5"),
    ("\\boxed{\\frac12}", "\\frac{1}{2}"),
    ("\\boxed{1+x^{2}}", "x^2+1"),
    ("\\boxed{\\{3,2,1\\}}", "\\{1,2,3\\}"),
    ("\\boxed{[1,2)}", "$[1,2)$"),
    ("\\boxed{(1, 2)}", "(1,2)"),
    (f"\\boxed{{{MATRIX}}}", MATRIX),
    ("\\boxed{\\sqrt{\\frac{8}{1}}}", "2\\sqrt{2}"),
    ("first \\boxed{7}, no: \\boxed{42}", 42),
    ("the final answer is $41$, corrected: \\boxed{42}", 42),
    ("So the answer is $42$.", 42),
    ("\\boxed{1{,}234}", "1,234"),
    ("\\boxed{0.00001}", 1e-05),
    ("\\boxed{3}", [2, 3]),
    ("\\boxed{0.333333}", "1/3"),
    ("x" * 1_000_000 + "\\boxed{42}", 42),
]  # fmt: skip
UNEQUAL = [
    ("\\boxed{43}", 42),
    ("\\boxed{1, 2, 3, 4}", 2),
    ("\\boxed{(1,2]}", "[1,2)"),
    ("\\boxed{0.33}", "1/3"),
    ("no answer", 42),
    ("\\boxed{42", "43"),
    ("\\boxed{}", 42),
    ("\ud800\\boxed{\udfff}", 42),
    ("\\boxed{" * 1000, 42),
    ("\\boxed{" + "9" * 9000 + "}", 42),
    ("\\boxed{__import__('os').getpid()}", 42),
]


@pytest.mark.parametrize(("text", "answer"), EQUAL)
async def test_equal(judge, text, answer):
    score = await judged(judge, text, answer)
    assert (score.value, score.parts["correct"], score.parts["found"]) == (1, 1, 1), score


@pytest.mark.parametrize(("text", "answer"), UNEQUAL)
async def test_unequal(judge, text, answer):
    assert (await judged(judge, text, answer)).value == 0


async def test_extract_boxed_reads_nothing_else():
    boxed = MathJudge(extract="boxed", workers=1)
    score = await judged(boxed, "The answer is $42$.", 42)
    assert score.parts == {"correct": 0, "found": 0, "in_time": 1}
    assert score.explanation == "no answer found, expected '42'"


ENDLESS = {
    "tower": "9^{9^{9^9}}",
    "factorial": "(10^{10})!",
    "brackets": "(" * 2000 + "1" + ")" * 2000,
    "fractions": "\\frac{1}{" * 900 + "1" + "}" * 900,
}


@pytest.mark.parametrize("kind", variants(ENDLESS, ["tower", "brackets"]))
async def test_an_answer_without_end_costs_its_limit_and_scores_zero(hasty, kind):
    score = await judged(hasty, f"\\boxed{{{ENDLESS[kind]}}}", 5)
    assert score.value == 0
    assert score.parts == {"correct": 0, "found": 1, "in_time": 0}
    assert score.explanation == "the comparison takes more than 0.5 s of CPU time, expected '5'"
    assert (await judged(hasty, "\\boxed{5}", 5)).value == 1  # in a new worker


async def test_an_answer_of_a_megabyte_is_not_compared(judge):
    score = await judged(judge, "\\boxed{" + "1+" * 500_000 + "1}", 5)
    assert score.value == 0
    assert score.explanation.startswith("an answer of 1,000,001 characters, more than")


@pytest.mark.parametrize("answer", [None, "", [], {"a": 1}, ["1", None]])
async def test_a_task_without_an_answer_cannot_be_scored(judge, answer):
    with pytest.raises(Unscorable, match="task q has"):
        await judged(judge, "\\boxed{42}", answer)


async def test_a_task_whose_answer_cannot_be_read_is_not_the_models_fault(judge, hasty):
    with pytest.raises(Unscorable, match=r"task q: math-verify cannot read its answer '\$\$'"):
        await judged(judge, "\\boxed{42}", "$$")
    with pytest.raises(Unscorable, match=r"task q: to read its answer .* more than 0.5 s"):
        await judged(hasty, "\\boxed{42}", "9^{9^{9^9}}")


async def test_a_worker_that_is_killed_is_replaced_without_a_score(judge):
    await judged(judge, "\\boxed{5}", 5)
    [worker] = judge._workers._idle
    os.kill(worker.pid, signal.SIGKILL)
    assert (await judged(judge, "\\boxed{5}", 5)).value == 1
    assert judge._workers._idle[0].pid != worker.pid


async def test_a_worker_of_a_large_process_is_kept():
    large = bytearray(1_200_000_000)
    large[::4096] = b"x" * len(large[::4096])
    judge = MathJudge(workers=1)
    del large
    await judged(judge, "\\boxed{5}", 5)
    [worker] = judge._workers._idle
    await judged(judge, "\\boxed{6}", 5)
    assert judge._workers._idle == [worker]


async def test_workers_that_keep_dying_give_no_score():
    judge = MathJudge(workers=1)
    judge._workers = Workers("ludus.core.errors", 1, 1.0, 2048)  # ends at once
    with pytest.raises(Unscorable, match="cannot start: it died with exit code 0"):
        await judged(judge, "\\boxed{5}", 5)


async def test_workers_compute_at_the_same_time():
    judge = MathJudge(workers=2)
    texts = ["\\boxed{5}", "\\boxed{6}"] * 4
    scores = await asyncio.gather(*(judged(judge, text, 5) for text in texts))
    assert [score.value for score in scores] == [1, 0] * 4
    assert 1 <= len(judge._workers._idle) <= 2


def test_no_worker_outlives_its_parent(tmp_path):
    program = tmp_path / "parent.py"
    program.write_text(
        "import asyncio, os, signal\n"
        "from judged import said\n"
        "from ludus.core.types import Task\n"
        "from ludus.judges.math import MathJudge\n"
        "judge = MathJudge(workers=1, limit_s=1)\n"
        "async def main():\n"
        "    await judge(Task(id='q', answer=5), said('\\\\boxed{5}'))\n"
        "    print(judge._workers._idle[0].pid, flush=True)\n"
        "    asyncio.create_task(judge(Task(id='q', answer=5), said('\\\\boxed{9^{9^{9^9}}}')))\n"
        "    await asyncio.sleep(0.3)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["tests/support", "."])}
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, check=False, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid = int(done.stdout)
    while running(pid):  # the test's own time limit ends this loop
        time.sleep(0.05)


def running(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("text", "gold", "value"),
    [
        ("\\boxed{2.6 \\times 10^{-9}}", "1.3e-9", 0.0),
        ("\\boxed{0}", "1.3e-9", 0.0),
        ("\\boxed{1.3 \\times 10^{-9}}", "1.3e-9", 1.0),
        ("\\boxed{0.0000000013}", "1.3e-9", 1.0),
        ("\\boxed{3e2}", "300", 1.0),
        ("\\boxed{6 \\times 10^{13}}", "6e13", 1.0),
    ],
)
async def test_small_and_large_numbers(judge, text, gold, value):
    """Rounded to six places, 1.3e-9 and 2.6e-9 are both 0."""
    assert (await judge(Task(id="q", answer=gold), said(text))).value == value


async def test_a_comparison_that_nobody_waits_for_ends() -> None:
    """Its process would go on for `limit_s` otherwise, and the next comparison would wait."""
    judge = MathJudge(limit_s=600, workers=1)
    assert (await judge(Task(id="q", answer="7"), said(r"\boxed{7}"))).value == 1.0
    looping = asyncio.create_task(judge(Task(id="q", answer="7"), said(r"\boxed{9^{9^{9^9}}}")))
    await asyncio.sleep(0.5)
    looping.cancel()
    async with asyncio.timeout(60):
        assert (await judge(Task(id="q", answer="7"), said(r"\boxed{7}"))).value == 1.0


async def test_a_judge_that_is_closed_ends_what_it_computes() -> None:
    judge = MathJudge(limit_s=600, workers=1)
    assert (await judge(Task(id="q", answer="7"), said(r"\boxed{7}"))).value == 1.0
    looping = asyncio.create_task(judge(Task(id="q", answer="7"), said(r"\boxed{(10^{10})!}")))
    await asyncio.sleep(0.5)
    await judge.close()
    with pytest.raises(Unscorable, match="died with exit code"):  # not a score of 0
        await looping
    assert (await judge(Task(id="q", answer="7"), said(r"\boxed{7}"))).value == 1.0
    await judge.close()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<answer>8</answer>", 1.0),
        ("first <answer>9</answer>, no: <answer> 16/2 </answer>", 1.0),
        ("<answer>9</answer> is not 8", 0.0),
        ("\\boxed{8} <answer>9</answer>", 1.0),
    ],
)
async def test_an_answer_between_markers_is_read(judge, text, value):
    assert (await judged(judge, text, "8")).value == value
