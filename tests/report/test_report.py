import math
import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import product

import pytest
from variants import variants

from ludus.core.types import Group, Message, Segment, Status, Task, Trajectory
from ludus.evaluate import compare, summarise
from ludus.report import ReportData, Rollout, write_report
from ludus.report.charts import Curve, duration, make_chart, nice_ticks, show, smooth, thinned
from ludus.report.collect import compared
from ludus.report.diagnosis import Finding
from ludus.report.page import MAX_TEXT, headline, render
from ludus.report.stacked import COLORS, MAX_COLUMNS, make_stacked, split_idle
from ludus.report.success import HELD_OUT, success_chart, tier_colors

TIERS = ("GoToLocal", "PickupLoc", "UnlockLocal")
EVIL = "<script>window.hacked = 1</script><img src=http://example.org/x.png onerror=hacked=1>"


def evaluation(label, chances, seed):
    draw = random.Random(seed)
    groups = []
    for i in range(300):
        tier = TIERS[i % 3]
        won = draw.random() < chances[i % 3]
        trajectory = Trajectory("t", "g", str(i), reward=(0.7 + 0.3 * draw.random()) * won)
        if i % 97 == 5:
            trajectory.status, trajectory.error = Status.ERROR_TIMEOUT, "30 s passed"
        task = Task(id=f"{tier}-{i}", tier=tier, data={"seed": i})
        groups.append(Group(task.id, task, [trajectory]))
    return summarise(groups, success_at=0.5, label=label, seconds=12.0)


def rollout(label, reward, turns=4, command="", heldout=False, **trajectory):
    draw = random.Random(turns)
    task = Task(id="GoToLocal-1042", tier="GoToLocal")
    goal = "Mission: go to the red ball.\nYou see a grey wall 2 steps ahead, a red ball 1 left."
    segments = [Segment(-1, list(range(24)), message=Message(role="user", content=goal))]
    texts = [goal]
    for turn in range(turns):
        tokens = [*draw.choice([["turn", " left"], ["go", " to", " red", " ball"]]), "<end>"]
        logprobs = [-draw.expovariate(2.0) for _ in tokens]
        said = Message(role="assistant", content="".join(tokens[:-1]))
        sampled = Segment(2 * turn, [1] * len(tokens), logprobs, said, policy_version=40)
        if turn == 1:  # the weights were updated after its first token
            sampled = replace(sampled, version_runs=[(40, 1), (41, len(tokens) - 1)])
        segments.append(sampled)
        reply = "You see a wall ahead. Nothing happens." if turn else EVIL
        told = Message(role="user", content=reply)
        segments.append(Segment(2 * turn + 1, [2] * 9, message=told))
        texts += [tokens, reply]
    played = Trajectory("t1", "g1", task.id, segments, reward=reward, **trajectory)
    return Rollout(label, task, played, texts, command, heldout)


def parts(draw):
    """A step of about 2.9 seconds, split, with its tokens, utilisation and memory."""
    seconds = {"sample": 1.6, "train": 0.9, "env_wait": 0.2, "judge": 0.0, "checkpoint": 0.1}
    seconds |= {"evaluate": 0.0, "idle": 0.1}
    split = {
        f"time/{name}_s": value * (0.8 + 0.4 * draw.random()) for name, value in seconds.items()
    }
    return {
        **split,
        "time/wall_s": sum(split.values()),
        "time/record_s": 0.02,
        "time/rollout_s": split["time/sample_s"] + split["time/env_wait_s"] + 0.03,
        "rollout/tokens": 15000.0,
        "rollout/unique_tokens": 9000.0,
        "train/tokens": 15000.0,
        "train/unique_tokens": 9000.0,
        "train/optimizer_steps": 1.0,
        "time/mfu": 0.21,
        "time/train_mfu": 0.4,
        "time/sample_mfu": 0.18,
        "time/peak_gflops": 121.0,
        "memory/rss_peak_gb": 0.83,
    }


def records():
    draw = random.Random(0)
    made = []
    for step in range(300):
        loss = 2.2 * math.exp(-step / 60) + 0.21 + draw.gauss(0, 0.03)
        made.append(
            {
                "stage": "sft",
                "step": step,
                "time": 10 + step * 0.3,
                "train/loss": loss,
                "train/lr": 1e-3 * min(1, step / 20),
                "train/grad_norm": 1 + draw.random(),
            }
        )
    for step in range(120):
        success = 0.85 - 0.33 * math.exp(-step / 35) + draw.gauss(0, 0.035)
        made.append(
            {
                "stage": "rl",
                "step": step,
                "time": 110 + step * 2.9,
                "rollout/episodes": 128.0,
                "rollout/sampled_tokens": 1900.0 + draw.random(),
                "rollout/success": min(success, 1.0),
                "rollout/reward": min(success, 1.0) * 0.88,
                "rollout/groups_with_signal": 0.45 + 0.1 * draw.random() - step / 400,
                "train/loss": draw.gauss(0, 0.01),
                "train/entropy": 0.9 * math.exp(-step / 80) + draw.gauss(0, 0.01),
                "train/policy_version": float(step + 1),
                "time/tokens_per_s": 5200 + draw.gauss(0, 200),
                **parts(draw),
            }
        )
        if (step + 1) % 30 == 0:
            made.append({"stage": "evaluate/rl", "step": step + 1, "time": 112 + step * 2.9,
                         "evaluate/success": min(success, 1.0) - 0.02})  # fmt: skip
    return made


SCORES = {"correct": 1.0, "length": -0.25}


@pytest.fixture(scope="module")
def data():
    before, after = (
        evaluation("after SFT", (0.7, 0.55, 0.4), 1),
        evaluation("after RL", (0.95, 0.9, 0.74), 2),
    )
    return ReportData(
        name="babyai-tiny",
        started="2025-03-01 10:00",
        records=records(),
        evaluations={
            "untrained": evaluation("untrained", (0.09, 0.04, 0.0), 3),
            "after SFT": before,
            "after RL": after,
        },
        evaluated_at={"untrained": 0, "after SFT": 0, "after RL": 120},
        evaluated_note="Step 0: after SFT.",
        comparison=compare(before, after),
        findings=[
            Finding("turns", "rl", 9, 1, "the limit cut 70 % <b>", "Raise `rollout.max_turns`"),
            Finding("length", "rl", 12, 1, "tokens cut 30 %", "Raise it", lasting=False),
        ],
        rollouts=[
            rollout(
                "First",
                0.0,
                6,
                "ludus show x-1 evaluate/after-000000/g0/e0",
                True,
                status=Status.TRUNCATED_TURNS,
            ),
            rollout("Best", 0.97, 2, scores=SCORES, explanation="5, equal to <5>"),
            rollout("Worst", 0.0, 5, dropped="all rewards of the group are equal"),
            rollout("Broken", None, 1, status=Status.ERROR_ENV, error=f"KeyError: {EVIL}"),
        ],
        settings={
            "algorithm": "grpo (clip 0.2, normalised advantages)",
            "model": "qwen3, 0.8 M parameters",
            "episodes a step": "16 tasks x 8",
            "learning rate": "3e-4",
            "seed": 0,
        },
        changes="name: babyai-tiny\nseed: 3\n",
        config="name: babyai-tiny\nmodel:\n  architecture: {name: qwen3}\n" + EVIL,
        versions={"ludus": "0.1.0", "torch": "2.13.0+cpu", "machine": "2 cores, x86_64"},
        timings={
            "demonstrations": 31.0,
            "SFT": 92.4,
            "RL": 348.1,
            "evaluation": 41.0,
            "report": 0.6,
        },
        dropped={"group without signal": 412, "error_timeout": 3},
    )


class Tags(HTMLParser):
    """Collects the elements of a page, and complains about those that are not closed."""

    VOID = frozenset({"meta", "link", "input", "br", "img", "path"})

    def __init__(self, page):
        super().__init__()
        self.found, self.open = [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page(data, tmp_path_factory):
    path = write_report(tmp_path_factory.mktemp("run") / "new" / "report.html", data)
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]
    return path


def test_the_page_is_self_contained(page):
    text = page.read_text(encoding="utf-8")
    tags = Tags(text)
    for tag, attributes in tags.found:
        assert tag not in {"img", "iframe", "object", "embed", "video", "audio"}
        assert "src" not in attributes
        if "href" in attributes:
            assert attributes["href"].startswith(("#", "data:"))
    assert "url(" not in text
    assert "@import" not in text
    assert len(text) < 400_000


def test_untrusted_text_stays_text(page):
    text = page.read_text(encoding="utf-8")
    assert sum(tag == "script" for tag, _ in Tags(text).found) == 1
    assert "&lt;script&gt;window.hacked" in text
    assert "<script>window.hacked" not in text


def test_the_page_says_what_happened(page):
    text = re.sub(r"\s+", " ", page.read_text(encoding="utf-8"))
    for said in (
        "Success on held-out tasks rose from",
        "after SFT",
        "UnlockLocal",
        "could not be scored (4 error_timeout: 30 s passed)",
        "Excluded from training: all rewards of the group are equal",
        "group without signal",
        "policy version 40 (1 token), 41 (",
        "5 min 48 s",
        "torch",
        "Resolved configuration",
        "grpo (clip 0.2, normalised advantages)",
        "train/entropy",
        "Scores: correct 1, length -0.25",
        "Judge: 5, equal to &lt;5&gt;",
        "<b>rl step 9</b> The limit cut 70 % &lt;b&gt;.",
        "<span>Raise <code>rollout.max_turns</code>.</span>",
        "Tokens cut 30 %. <em>No longer so at the end.</em>",
        '<code class="command">ludus show x-1 evaluate/after-000000/g0/e0</code>',
        "Recipe: all that differs from the defaults",
        "Success over RL steps",
        "interval and p-value of one method, Bonett-Price",
    ):
        assert said in text, said


def test_tiers_show_the_two_evaluations_that_are_compared(page, data):
    text = page.read_text(encoding="utf-8")
    rows = text.count('<th scope="row">after RL')
    assert rows == 1 + len(data.evaluations["after RL"].tiers)
    assert text.count('<th scope="row">untrained') == 1


def test_an_empty_run_still_gives_a_page(tmp_path):
    text = write_report(tmp_path / "report.html", ReportData(name="x")).read_text(encoding="utf-8")
    Tags(text)
    assert "No held-out tasks were evaluated" in text
    assert "Curves" not in text


def test_the_headline_claims_only_what_the_interval_shows(data):
    before, after = data.evaluations["after SFT"], data.evaluations["after RL"]

    def said(a, b):
        return headline(ReportData(name="x", comparison=compare(a, b)))

    assert "rose from" in said(before, after)
    assert "fell from" in said(after, before)
    assert "did not change significantly" in said(before, before)
    only = headline(ReportData(name="x", evaluations={"after": after}))
    assert only.startswith("Success on held-out tasks: 8")
    few = before.model_copy(update={"outcomes": before.outcomes[:200]})
    assert "197 tasks of both evaluations; 100 were played in one alone)" in said(few, after)


def test_evaluations_that_cannot_be_compared_leave_a_report_that_says_why(data):
    before, after = data.evaluations["after SFT"], data.evaluations["after RL"]
    other = after.model_copy(update={"success_at": 0.9})
    comparison, why = compared({"before RL": before, "after RL": other})
    assert comparison is None
    text = headline(ReportData(name="x", evaluations={"b": before, "a": other}, uncompared=why))
    assert "Not compared with the start: the evaluations differ in success_at: 0.5 and 0.9" in text


def test_texts_beyond_reason_are_cut_and_counted(tmp_path):
    task = Task(id="t")
    segment = Segment(-1, [1], message=Message(role="user", content=""))
    shown = Rollout(
        "Long", task, Trajectory("a", "g", "t", [segment]), ["x" * (MAX_TEXT + 7) + "\ud800"]
    )
    path = write_report(tmp_path / "r.html", ReportData(name="x", rollouts=[shown]))
    text = path.read_text(encoding="utf-8")
    assert "8 more characters" in text
    assert "x" * MAX_TEXT in text
    assert "x" * (MAX_TEXT + 1) not in text


def test_lone_surrogates_do_not_stop_the_report(tmp_path):
    assert write_report(tmp_path / "r.html", ReportData(name="x\ud800")).exists()


def test_a_failed_write_leaves_the_old_page(tmp_path, data, monkeypatch):
    path = write_report(tmp_path / "report.html", ReportData(name="old"))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ludus.core.files.os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_report(path, data)
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    assert "<title>old" in path.read_text(encoding="utf-8")


def test_ticks_cover_the_range_at_round_values():
    assert nice_ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert nice_ticks(0.13, 2.31) == [0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert nice_ticks(3, 3)[0] <= 3 <= nice_ticks(3, 3)[-1]
    assert nice_ticks(0, 0) == [-0.6, -0.4, -0.2, 0.0, 0.2, 0.4, 0.6]
    for low, high in [(-3e-7, 4e-7), (0, 119), (1e6, 7e6), (0.9999, 1.0)]:
        ticks = nice_ticks(low, high)
        assert ticks[0] <= low < high <= ticks[-1]
        assert 3 <= len(ticks) <= 9


def test_smoothing_is_a_centred_mean():
    means, spreads = smooth([0, 0, 3, 0, 0], 3)
    assert means == [0, 1, 1, 1, 0]
    assert spreads == pytest.approx([0, math.sqrt(2), math.sqrt(2), math.sqrt(2), 0])
    assert smooth([4, 2, 0], 3)[0] == [3, 2, 1]
    assert smooth([1, 2], 1) == ([1, 2], [0, 0])


def test_long_curves_are_thinned_with_their_ends():
    assert thinned(5, 400) == [0, 1, 2, 3, 4]
    chosen = thinned(10_000, 400)
    assert len(chosen) == 400
    assert (chosen[0], chosen[-1]) == (0, 9999)


def test_the_band_of_a_chart_does_not_stretch_its_axis():
    values = [4.0, 0.2, 0.1, 0.3, 0.1, 0.2, 0.1, 0.2, 0.1, 0.1]
    records = [
        {"stage": "sft", "step": i, "time": 0.0, "train/loss": v} for i, v in enumerate(values)
    ]
    [plot] = make_chart(records, Curve("SFT loss", "sft", "train/loss")).plots
    assert [text for _, text in plot.y_ticks] == ["0", "1", "2", "3", "4"]


def test_a_chart_has_each_axis_and_counts_episodes():
    made = [
        {"stage": "rl", "step": i, "time": 60.0 * i, "rollout/episodes": 10.0, "rollout/reward": i}
        for i in range(4)
    ]
    made.insert(2, {"stage": "rl", "step": 9, "time": 1.0, "rollout/reward": math.nan})
    chart = make_chart(made, Curve("Reward", "rl", "rollout/reward"))
    assert [plot.axis for plot in chart.plots] == ["step", "episodes", "time"]
    assert chart.plots[2].x_label == "wall time, minutes"
    assert chart.labels[-1] == "3 (this step 3)\nstep 3, 40 episodes, 3 min"
    assert len(chart.plots[0].pixels) == 4
    assert make_chart(made[:1], Curve("Reward", "rl", "rollout/reward")) is None
    assert make_chart(made, Curve("Loss", "sft", "train/loss")) is None


def test_numbers_as_people_write_them():
    assert [duration(s) for s in (0.42, 9.96, 59.7, 200, 7500)] == [
        "0.4 s", "10 s", "1 min", "3 min 20 s", "2 h 5 min",
    ]  # fmt: skip
    assert [show(v) for v in (0.03124, 12345.6, 2.5e-5, 0.0)] == [
        "0.0312",
        "12,346",
        "2.5e-05",
        "0",
    ]
    assert show(0.5721, "%") == "57.2 %"


@pytest.mark.parametrize(
    ("width", "scheme"),
    variants(product([1280, 360], ["light", "dark"]), [(1280, "light"), (360, "dark")]),
)
def test_in_a_browser(browser, page, scheme, width):
    tab = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    complaints, requests = [], []
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("request", lambda request: requests.append(request.url))
    tab.goto(page.as_uri())
    assert tab.evaluate("window.hacked") is None
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.locator(".chart").count() == 4

    for axis in ("step", "episodes", "time"):
        tab.locator(f"label[for=over-{axis}]").click()
        shown = tab.locator(".chart").first.locator(".plot:visible")
        assert shown.count() == 1
        assert f"over-{axis}" in shown.get_attribute("class")
    tab.locator(".chart").first.locator(".plot:visible").hover()
    assert "this step" in tab.locator("#tip").inner_text()

    background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.locator("details:not([open])").count() == 0
    assert complaints == []
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
    tab.close()


def test_the_parts_of_a_step_are_stacked(data):
    chart = make_stacked(data.records, "rl")
    assert chart is not None
    assert [part.name for part in chart.parts] == [
        "sampling", "training", "waiting for environments", "bookkeeping of episodes",
        "checkpoints", "recording results", "rest of the loop",
    ]  # fmt: skip
    assert sum(part.seconds for part in chart.parts) == pytest.approx(chart.seconds)
    assert sum(part.share for part in chart.parts) == pytest.approx(1)
    assert chart.steps == 120
    facts = dict(chart.facts)
    assert facts["tokens trained"] == "1,800,000; computed: 1,080,000"
    assert facts["peak memory, resident"] == "0.83 GB"
    below = [0.0] * MAX_COLUMNS
    for part in chart.parts:  # each band stands on the one before
        points = [tuple(map(float, point.split(","))) for point in part.points.split()]
        assert len(points) == 4 * MAX_COLUMNS
        bottom = [y for _, y in points[2 * MAX_COLUMNS :][::-1]]
        if part is not chart.parts[0]:
            assert bottom == below
        below = [y for _, y in points[: 2 * MAX_COLUMNS]]
    page = render(data)
    assert "Seconds a step" in page
    assert "waiting for environments" in page


def test_a_run_of_one_step_has_its_parts():
    chart = make_stacked([{**records()[-2], "stage": "rl", "step": 7}], "rl")
    assert chart is not None
    assert [text for _, text in chart.x_ticks] == ["7"]
    assert make_stacked([{"stage": "rl", "step": 0, "time": 0.0}], "rl") is None


def test_idle_time_is_split_without_a_rest_that_is_negative():
    row = {"time/idle_s": 0.5, "time/sample_s": 1.0, "time/env_wait_s": 0.2, "time/rollout_s": 1.5}
    split = split_idle({**row, "time/record_s": 0.1})
    assert (split["record"], split["episodes"]) == pytest.approx((0.1, 0.3))
    assert split["rest"] == pytest.approx(0.1)
    assert "idle" not in split
    ahead = split_idle({**row, "time/rollout_s": 0.0, "time/record_s": 9.0})  # played meanwhile
    assert (ahead["record"], ahead["episodes"], ahead["rest"]) == (0.5, 0.0, 0.0)


def test_a_thing_has_one_colour(data):
    text = render(data)
    evaluation = COLORS["evaluate"]
    assert evaluation == HELD_OUT
    assert f'<i class="key c{evaluation}"></i>evaluation' in text
    assert f'<i class="key c{HELD_OUT}"></i>all tasks' in text
    for tier, color in tier_colors(data.evaluations).items():
        assert text.count(f'<i class="key c{color}"></i>{tier}') == 2  # in the chart and the table
    [rl, _] = [make_stacked(data.records, stage) for stage in ("rl", "sft")]
    assert [part.color for part in rl.parts] == [0, 1, 3, 7, 6, 8, 9]


def test_success_over_steps_has_all_tasks_and_each_tier(data):
    chart = success_chart(data.evaluations, data.evaluated_at)
    assert [line.name for line in chart.lines] == [*sorted(TIERS), "all tasks"]
    assert all(mark.low is not None for mark in chart.lines[-1].marks)
    assert all(mark.low is None for line in chart.lines[:-1] for mark in line.marks)
    assert all("(" in cell for row in chart.table[1:] for cell in row[1:])
    assert success_chart(data.evaluations, {"after RL": 120}) is None


def test_two_evaluations_at_one_step_are_both_in_the_numbers(data):
    first, last = list(data.evaluations.values())[:2]
    evaluations = {"before SFT": first, "before RL": last, "after RL": last}
    chart = success_chart(evaluations, {"before SFT": 0, "before RL": 0, "after RL": 9})
    [step, *_, every] = chart.table[1]
    shares = [f"{100 * each.success.value:.1f}" for each in (first, last)]
    assert step == "0"
    assert [part.split()[0].rstrip("\u202f%") for part in every.split(", then ")] == shares
    assert len(chart.lines[-1].marks) == 3


def test_tokens_of_held_out_episodes_are_not_called_trained(data):
    first = render(data).split('<details class="rollout"')[1]
    assert "not trained" in first
    assert "Excluded from training" not in first


def test_a_run_without_a_finding_says_so():
    assert "No warning" in render(ReportData(name="x", findings=[]))
    assert "Diagnosis" not in render(ReportData(name="x"))
