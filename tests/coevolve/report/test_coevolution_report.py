from __future__ import annotations

import io
import json
import math
import re
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from made_coevolution import EVIL, RTL, World, make_world
from rich.console import Console
from variants import variants

from ludus.coevolve.report.facts import read_facts
from ludus.coevolve.report.page import headline, try_report, write_report
from ludus.coevolve.report.pages import PER_PAGE, make_pages, write_pages
from ludus.coevolve.report.problems import KEPT, Answer, Problem, read_problems
from ludus.coevolve.report.show import render
from ludus.coevolve.storage import Storage, read_rows, write_rows
from ludus.core.errors import ConfigError, DataError, LudusError
from ludus.pipeline.monitoring.progress import Display


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    made = make_world(tmp_path_factory.mktemp("coevolve") / "tiny")
    write_report(made.storage, made.planned)
    return made


def text_of(path: Path) -> str:
    return re.sub(r"\s+", " ", path.read_text(encoding="utf-8"))


def on_screen(renderable: Any, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_numbers_are_those_of_the_files(world: World) -> None:
    facts = read_facts(world.storage)
    assert [one.number for one in facts.iterations] == [0, 1, 2, 3]
    first = facts.iterations[1]
    rows = read_rows(world.storage.questions(1, "proposals"))
    assert first.counts["proposed"] == len(rows) == 80
    assert first.counts["parsed"] == 72
    assert first.counts["distinct"] == len({r["question"] for r in rows if r["question"]}) == 64
    assert first.counts["voted"] == 56
    assert first.counts["kept"] == len(read_rows(world.storage.questions(1, "problems")))
    assert first.counts["kept"] + sum(first.reasons.values()) == 80
    assert len(first.shares) == 56
    answers = read_rows(world.storage.temporary(1, "answers"))
    agreed = sum(row.get("agrees") is True for row in answers)
    assert first.claims is not None
    assert (first.claims.value, first.claims.num_tasks) == (agreed / 56, 56)
    assert first.repetition is not None
    assert first.repetition.distinct == 64 / 72
    assert first.repetition.largest >= first.repetition.mean >= 1 / 72
    assert first.frontier is not None
    assert first.frontier.pass_rate.value == pytest.approx(0.63)
    assert first.frontier.pass_rate.low == pytest.approx(0.5322, abs=1e-3)  # Wilson, 63 of 100
    assert len(first.curriculum) == len(first.executor) == 20
    assert facts.iterations[0].counts == {}


def test_the_report_has_curves_tables_and_stages(world: World) -> None:
    text = text_of(world.storage.report)
    for said in (
        "Held-out accuracy rose in 3 iterations from 35.5 % to 75.0 %",
        "Frontier: pass rate",
        "63.0 % (53.2 to 71.8)",
        "Tool calls an answer",
        "Problems of an iteration",
        "p is above the band",
        "Claimed answers that agree",
        "Repetition R_rep",
        "Uncertainty R_unc",
        "Training of the executor",
        'href="runs/curriculum-1-1/report.html"',
        'href="generated_question/iteration-3/index.html"',
        "iteration-4/generate",
        "to do",
        "Resolved recipe",
    ):
        assert said in text, said
    assert text.count("<svg") == text.count("<summary>Numbers</summary>") == 17
    assert "http-equiv" in text
    assert EVIL not in text


def test_the_report_of_a_beginning_co_evolution(tmp_path: Path) -> None:
    storage = Storage(tmp_path / "new")
    storage.root.mkdir()
    storage.record("start", {"run": "start-1", "steps": 3, "seconds": 2.0})
    text = text_of(write_report(storage, ["start", "iteration-0/evaluate"]))
    assert "No held-out tasks were evaluated" in text
    assert text.count("<svg") == 0
    assert "iteration-0/evaluate" in text


def test_a_change_within_the_interval_is_not_claimed(world: World, tmp_path: Path) -> None:
    root = tmp_path / "same"
    shutil.copytree(world.storage.root, root)
    evaluation = json.loads((root / "evaluation" / "iteration-0.json").read_text())
    for number in (1, 2, 3):
        path = root / "evaluation" / f"iteration-{number}.json"
        path.write_text(json.dumps({**evaluation, "iteration": number}))
    assert "did not change significantly" in headline(read_facts(Storage(root)))


def test_a_damaged_evaluation_is_named(world: World, tmp_path: Path) -> None:
    root = tmp_path / "damaged"
    shutil.copytree(world.storage.root, root)
    path = root / "evaluation" / "iteration-2.json"
    path.write_text('{"heldout": {"success": 1}}')
    with pytest.raises(DataError, match=r"iteration-2\.json is no evaluation"):
        read_facts(Storage(root))


PROPOSAL = {"id": "a", "text": "t", "question": "q", "claimed": "1", "reason": None}
VOTE = {
    "question": "q",
    "statuses": ["completed"],
    "tool_calls": [0],
    "texts": ["x"],
    "consistency": 1.0,
    "counts": [["1", 1]],
    "classes": [0],
    "reason": None,
}
FILES = {"proposals": PROPOSAL, "answers": VOTE, "rejected": {"id": "a", "reason": "p"}}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("proposals", {"question": ["q"]}),
        ("proposals", {"text": 7}),
        ("answers", {"statuses": ["done"]}),
        ("answers", {"texts": []}),
        ("answers", {"consistency": math.nan}),
        ("answers", {"counts": [1]}),
        ("rejected", {"reason": None}),
        ("state", {"iteration-1/filter": 5}),
        ("state", {"iteration-1/filter": {"seconds": "x"}}),
        pytest.param("proposals", b"\xff\xfe\n", id="binary"),
        pytest.param("proposals", b"[" * 100_000 + b"\n", id="deep"),
        pytest.param("state", b"[" * 100_000, id="deep-state"),
        pytest.param("answers", json.dumps(VOTE).encode(), id="no end of line"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, change: Any) -> None:
    storage = Storage(tmp_path)
    storage.record("iteration-1/generate", {"seconds": 1.0})
    paths = {file: storage.questions(1, file) for file in FILES}
    paths |= {"answers": storage.temporary(1, "answers"), "state": storage.state}
    for file, row in FILES.items():
        write_rows(paths[file], [row])
    render(storage, 1, "1")
    if isinstance(change, bytes):
        paths[name].write_bytes(change)
    elif name == "state":
        storage.state.write_text(json.dumps({"stages": change}))
    else:
        write_rows(paths[name], [{**FILES[name], **change}])
    for use in (lambda: render(storage, 1, "1"), lambda: write_report(storage, [])):
        with pytest.raises(DataError, match=f"{name}.json"):
            use()


def test_a_label_that_is_no_stage_is_listed(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    storage.record("iteration-1/generate", {})
    for label in ("iteration-\u00b2/score", f"iteration-{'9' * 5000}/score"):
        storage.record(label, {})
    assert [one.number for one in read_facts(storage).iterations] == [0, 1]


def test_every_problem_is_on_one_page(tmp_path: Path) -> None:
    made = make_world(tmp_path / "many", iterations=1, proposals=2 * PER_PAGE + 90, k=3)
    folder = write_pages(made.storage, 1, read_problems(made.storage, 1)).parent
    pages = sorted(folder.glob("*-*.html"))
    assert {page.name.split("-")[0] for page in pages} == {"kept", "rejected"}
    numbers = [n for page in pages for n in re.findall(r'id="p(\d+)"', page.read_text())]
    assert sorted(map(int, numbers)) == list(range(1, 2 * PER_PAGE + 91))
    assert max(page.read_text().count('class="problem"') for page in pages) <= PER_PAGE
    shares = re.findall(r'<span class="share">([\d.]+)', (folder / "rejected-1.html").read_text())
    assert shares == sorted(shares)
    (folder / "kept-99.html").write_text("old")
    write_pages(made.storage, 1, read_problems(made.storage, 1))
    assert not (folder / "kept-99.html").exists()
    for page in pages:
        assert page.name in (folder / "index.html").read_text()


def test_a_full_page_of_long_texts_stays_small(tmp_path: Path) -> None:
    answers = [Answer("completed", 1, '"' * 100_000, 0)] * 10
    problem = Problem(
        1, "generate", "x", "<" * 8000, "y" * 1000, 0.5, "z" * 1000, counts=[("z" * 1000, 10)],
        answers=answers, fate=KEPT,
    )  # fmt: skip
    assert len(make_pages([problem] * 8000)) == -(-8000 // PER_PAGE)
    index = write_pages(Storage(tmp_path), 1, [problem] * PER_PAGE)
    assert (index.parent / "kept-1.html").stat().st_size < 10_000_000


def test_hostile_texts_stay_texts(world: World) -> None:
    folder = world.storage.questions(1, "problems").parent
    pages = [world.storage.report, *folder.glob("*.html")]
    assert len(pages) == 4
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert "<script>window" not in text
        assert "<img" not in text
        assert not set(RTL) & set("\u202e\u2066") & set(text)
        assert "\x1b" not in text
        assert max(map(len, text.splitlines())) < 30_000
    kept = (folder / "kept-1.html").read_text(encoding="utf-8")
    assert "&lt;script&gt;window.hacked" in kept
    assert "99,610 more characters" in kept


def test_half_a_surrogate_pair_is_written_and_read(tmp_path: Path) -> None:
    rows = [{"text": "a\ud800b"}, {"text": "ü"}]
    write_rows(tmp_path / "rows.jsonl", rows)
    assert read_rows(tmp_path / "rows.jsonl") == rows
    assert "ü" in (tmp_path / "rows.jsonl").read_text(encoding="utf-8")


def test_answers_that_do_not_count_have_no_class(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    row = {"id": "a", "status": "completed", "text": "t", "question": "q", "claimed": "1"}
    write_rows(storage.questions(1, "proposals"), [{**row, "reason": None}])
    vote = {"id": "a", "question": "q", "claimed": "1", "statuses": ["error_env", "completed"]}
    vote |= {"tool_calls": [0, 2], "texts": [None, "1"], "consistency": 1.0, "answer": "1"}
    vote |= {"counts": [["1", 1]], "classes": [0], "tie": False, "agrees": True}
    write_rows(storage.temporary(1, "answers"), [{**vote, "mean_tool_calls": 2.0, "reason": None}])
    (problem,) = read_problems(storage, 1)
    assert [answer.group for answer in problem.answers] == [None, 0]
    assert problem.fate == ""


def test_the_terminal_lists_iterations_problems_and_one_problem(world: World) -> None:
    iterations = on_screen(render(world.storage, None, None))
    assert "35.5 % (29.2 to 42.3)" in iterations
    problems = on_screen(render(world.storage, 1, None))
    assert len(re.findall(r"^\d+ ", problems, re.MULTILINE)) == 80
    assert "p is below the band" in problems
    one = on_screen(render(world.storage, 1, "1"))
    assert "answer 10: not read, truncated length" in one
    assert one == on_screen(render(world.storage, 1, "generate-000001/g0000/e000"))
    assert one.count("x") > 100_000
    for text in (problems, one):
        assert not set("\x1b\u202e\u2066\ud800") & set(text)
        assert "\\u202e" in text


def test_80_columns_cut_neither_a_number_nor_an_id(world: World) -> None:
    iterations = on_screen(render(world.storage, None, None), width=80)
    heads = [line for line in iterations.splitlines() if line.startswith("iteration")]
    assert heads[0].split() == [
        *("iteration", "proposed", "parsed", "distinct", "voted", "kept", "claims", "agree")
    ]
    assert heads[1].split() == ["iteration", "tool", "calls", "frontier", "held-out"]
    assert re.search(r"^0 .*35\.5 % \(29\.2 to 42\.3\)", iterations, re.MULTILINE)
    problems = on_screen(render(world.storage, 1, None), width=80)
    for problem in read_problems(world.storage, 1):
        entry = rf"^{problem.number} +{re.escape(problem.id)} +{problem.fate.split()[0]}"
        assert re.search(entry, problems, re.MULTILINE)
    one = on_screen(render(world.storage, 1, "1"), width=80)
    assert re.search(r"^problem +1, generate-000001/g0000/e000 *$", one, re.MULTILINE)


def test_what_is_not_there_is_named(world: World, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no co-evolution"):
        render(Storage(tmp_path / "none"), None, None)
    with pytest.raises(DataError, match=r"iteration 9 has no proposals; .* 1, 2, 3"):
        render(world.storage, 9, None)
    with pytest.raises(ConfigError, match="has the problems 1 to 80"):
        render(world.storage, 1, "99")


def test_a_report_that_cannot_be_written(world: World, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no co-evolution"):
        write_report(Storage(tmp_path / "none"), [])
    root = tmp_path / "full"
    shutil.copytree(world.storage.root, root)
    (root / "report.html").unlink()
    (root / "report.html").mkdir()
    with pytest.raises(LudusError, match=r"report\.html.*: the report cannot be written: "):
        write_report(Storage(root), [])


def test_a_failed_report_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = Storage(tmp_path)
    storage.record("iteration-0/evaluate", {})
    display = Display()
    try_report(storage, [], 0, display)
    assert storage.report.is_file()
    storage.report.unlink()
    storage.report.mkdir()
    try_report(storage, [], 0, display)
    display.close()
    told = capsys.readouterr().err
    assert "report: " in told
    assert "the report was not written: " in told


@pytest.mark.parametrize(
    ("width", "scheme"),
    variants(product([1280, 360], ["light", "dark"]), [(1280, "light"), (360, "dark")]),
)
def test_in_a_browser(browser: Any, world: World, scheme: str, width: int) -> None:
    tab = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    complaints: list[str] = []
    requests: list[str] = []
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("request", lambda request: requests.append(request.url))

    def sound() -> None:
        assert tab.evaluate("window.hacked") is None
        assert tab.evaluate("document.documentElement.scrollWidth") <= width

    tab.goto(world.storage.report.as_uri())
    sound()
    assert tab.locator("svg.lines").count() == 17
    background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")
    tab.locator("summary", has_text="Numbers").first.click()
    assert "75.0 % (68.6 to 80.5)" in tab.locator("table:visible").first.inner_text()
    tab.locator("nav a", has_text="Problems of iteration 1").click()
    sound()
    tab.locator("a", has_text="kept 1").click()
    tab.locator(".problem summary").first.click()
    sound()
    assert tab.locator(".answers:visible li").count() == 10
    assert "<script>window.hacked" in tab.locator(".problem .question").first.inner_text()
    tab.locator("nav a").last.click()
    assert "Rejected problems" in tab.locator("h1").inner_text()
    for problem in tab.locator(".problem").all():
        problem.evaluate("e => e.open = true")
    sound()
    assert complaints == []
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
    tab.close()
