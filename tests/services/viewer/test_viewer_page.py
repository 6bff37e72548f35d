"""The page in a real Chromium: every view, live, hostile text, keys, phone, dark, token, faults."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from variants import variants
from viewer_world import OTHER, RUN, make_runs, trajectory, viewer, write_live

from ludus.core.types import Group, Task
from ludus.report.diagnosis import Finding
from ludus.report.diagnosis.diagnosis import write_findings
from ludus.store import RunStore

BACKGROUND = "getComputedStyle(document.body).backgroundColor"
TOKEN = "a-token-of-many-characters"
FIRST = quote("rl-000000/g0000/e000", safe="")
VIEWS = {
    "": "#/",
    "run": f"#/run?run={RUN}",
    "step": f"#/step?run={RUN}&stage=rl&step=3",
    "rollouts": f"#/rollouts?run={RUN}&sort=reward",
    "rollout": f"#/rollout?run={RUN}&id={FIRST}",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with viewer(folder) as address:
        yield address


@contextmanager
def tab(browser: Any, address: str = "", width: int = 1280, scheme: str = "light") -> Iterator[Any]:
    """A page in a profile of its own that complains of nothing and loads nothing from elsewhere."""
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(30_000)
    complaints: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    if address:
        page.goto(address)
        page.wait_for_selector("main[data-ready]")
    yield page
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
    origin = page.evaluate("location.origin")
    context.close()
    assert [one for one in complaints if "401" not in one and "503" not in one] == []
    assert [one for one in requests if not one.startswith((origin, "data:"))] == []


def until(page: Any, expression: str) -> None:
    """Wait until an expression is true. Playwright's own wait is stopped by the page's policy."""
    deadline = time.monotonic() + 30
    while not page.evaluate(f"Boolean({expression})"):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(50)


@pytest.mark.parametrize(
    ("width", "scheme"),
    variants(product([1280, 360], ["light", "dark"]), [(1280, "light"), (360, "dark")]),
)
def test_every_view(browser: Any, url: str, width: int, scheme: str) -> None:
    with tab(browser, f"{url}/{VIEWS['']}", width, scheme) as page:
        for name, address in VIEWS.items():
            page.goto(f"{url}/{address}")
            page.wait_for_selector(f"main[data-ready={name or 'runs'}]")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        background = page.evaluate(BACKGROUND)
        assert (background == "rgb(255, 255, 255)") == (scheme == "light")
        page.keyboard.press("t")
        assert page.evaluate(BACKGROUND) != background


def test_curves_of_two_runs(browser: Any, url: str) -> None:
    with tab(browser, url) as page:
        assert page.locator("tbody tr").count() == 2
        page.get_by_label(f"curves of {RUN}").check()
        until(page, "document.querySelectorAll('.legend > span').length === 2")
        loss = page.locator("figure", has_text="train/loss")
        assert loss.locator("polyline").count() == 2
        loss.locator("svg").hover()
        assert f"{RUN}:" in page.locator("#tip").inner_text()
        page.get_by_role("button", name="time").click()
        until(page, "location.hash.includes('x=time')")
        page.reload()
        page.wait_for_selector("main[data-ready]")
        assert page.get_by_label(f"curves of {RUN}").is_checked()


def test_a_rollout_by_token(browser: Any, url: str) -> None:
    with tab(browser, f"{url}/{VIEWS['rollout']}") as page:
        assert page.locator(".segment").count() == 6
        assert page.locator(".segment.trained").count() == 4
        assert page.locator(".segment.given").count() == 2
        assert page.locator(".nodes li").count() == 5  # [0], [1], its two branches, and [4]
        assert page.locator(".branch").all_inner_texts() == [
            "branch: continues after [0]",
            "branch: continues after [1]",
        ]
        tokens = "[...document.querySelectorAll('.segment.trained .tok')]"
        colors = f"{tokens}.map(token => getComputedStyle(token).backgroundColor)"
        by_logprob = page.evaluate(colors)
        assert len(set(by_logprob)) > 2
        for coloring in ("entropy", "advantage", "none"):
            page.keyboard.press("c")
            page.wait_for_selector(f"main[data-coloring={coloring}]")
        assert set(page.evaluate(colors)) == {"rgba(0, 0, 0, 0)"}
        page.locator(".segment.trained .tok").first.hover()
        told = page.locator("#tip").inner_text()
        assert "logprob -0.1, p 0.905" in told
        assert "entropy 0.1 nats" in told
        assert "advantage -1.5" in told
        folded = page.locator(".segment.tool details")
        assert folded.get_attribute("open") is None
        assert page.locator(".call").get_attribute("open") is None
        page.keyboard.press("x")
        assert folded.get_attribute("open") is not None


def test_two_rollouts_of_a_group_side_by_side(browser: Any, url: str) -> None:
    with tab(browser, f"{url}/{VIEWS['rollout']}") as page:
        page.keyboard.press("b")
        page.wait_for_selector(".panes.two .pane + .pane")
        page.keyboard.press("]")
        until(page, "document.querySelector('h1').textContent.endsWith('e001')")
        assert page.locator(".pane").count() == 1


def test_why_nothing_trained(browser: Any, url: str) -> None:
    with tab(browser, f"{url}/{VIEWS['run']}") as page:
        page.wait_for_selector("tbody .badge.bad")
        page.get_by_role("link", name="rl 3").click()
        page.wait_for_selector("main[data-ready=step]")
        why = page.locator(".why").inner_text()
        assert "No gradient: no row was left to train on" in why
        assert "4 × no signal" in why
        page.locator(".chip.dropped").first.click()
        page.wait_for_selector("main[data-ready=rollout]")
        assert "Dropped: no signal" in page.locator(".why").inner_text()
        assert page.locator(".segment.trained").count() == 0


def test_findings_of_the_diagnosis(browser: Any, tmp_path: Path) -> None:
    make_runs(tmp_path)
    found = [
        Finding("turns", "rl", 9, 1, "the limit of turns cut 70 %", "Raise `rollout.max_turns`"),
        Finding("drift", "rl", 12, 1, "<b>drift</b>", "Lower it", lasting=False),
    ]
    write_findings(tmp_path / RUN / "findings.json", found)
    with viewer(tmp_path) as url, tab(browser, f"{url}/{VIEWS['run']}", 360) as page:
        page.wait_for_selector("main[data-ready=run]")
        lasting, passed = page.locator(".why").all_inner_texts()
        assert "rl step 9 the limit of turns cut 70 %. Raise `rollout.max_turns`." in lasting
        assert "<b>drift</b>. No longer so. Lower it." in passed
        assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_search_sort_and_keys(browser: Any, url: str) -> None:
    with tab(browser, f"{url}/#/rollouts?run={RUN}") as page:
        page.get_by_role("button", name="reward").click()
        until(page, "location.hash.includes('sort=reward')")
        until(page, "document.querySelector('tbody td.number')?.textContent === '3.75'")
        page.locator("select[name=status]").select_option("error_env")
        until(page, "document.querySelectorAll('tbody tr').length === 4")
        page.keyboard.press("Tab")
        page.locator("h1").click()
        page.keyboard.press("/")
        page.keyboard.type("task-2-2")
        until(page, "document.querySelectorAll('tbody tr').length === 1")
        page.keyboard.press("Escape")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.wait_for_selector("main[data-ready=rollout]")
        assert "error_env: it raised" in page.locator(".why").inner_text()
        page.keyboard.press("u")
        page.wait_for_selector("main[data-ready=step]")
        page.keyboard.press("?")
        assert page.locator("dialog").is_visible()


def test_pages_follow_each_other(browser: Any, tmp_path: Path) -> None:
    make_runs(tmp_path)
    with RunStore.open(None, tmp_path) as store:
        for step in range(10, 16):
            groups = [
                Group(f"g{g}", Task(id="t"), [trajectory(step, g, m) for m in range(4)])
                for g in range(3)
            ]
            store.record_step(RUN, "rl", step, groups, {})
    with viewer(tmp_path) as url, tab(browser, f"{url}/#/rollouts?run={RUN}") as page:
        until(page, "document.querySelectorAll('tbody tr').length === 50")
        page.get_by_role("button", name="More").click()
        until(page, "document.querySelectorAll('tbody tr').length === 100")
        page.get_by_role("button", name="More").click()
        until(page, "document.querySelectorAll('tbody tr').length === 120")


def test_a_running_step_is_live(browser: Any, tmp_path: Path) -> None:
    make_runs(tmp_path)
    write_live(tmp_path)
    with viewer(tmp_path) as url, tab(browser, f"{url}/#/run?run={RUN}") as page:
        panel = page.locator(".live[aria-label]")
        panel.wait_for()
        waits = "waiting: 3 for their environment, 2 for a tool, 2 for the sampler, which computes"
        assert f"The learner waits for 7 episodes ({waits})." in panel.inner_text()
        assert panel.locator(".column").count() == 3
        write_live(tmp_path, tokens_per_s=777.0, busy={"train": 1}, playing=0)
        until(page, "document.querySelector('section.live').textContent.includes('777')")
        assert "The learner trains" in panel.inner_text()
        with RunStore.open(None, tmp_path) as store:
            store.record_step(RUN, "rl", 77, [], {"train/loss": 0.5, "train/optimizer_steps": 1.0})
        page.get_by_role("link", name="rl 77").wait_for()
        write_live(tmp_path, age_s=400)
        until(
            page, "document.querySelector('section.live').textContent.includes('no sign of life')"
        )
        (tmp_path / RUN / "live.json").unlink()
        until(page, "document.querySelector('section.live').hidden")


def test_a_token_opens_the_page(browser: Any, folder: Path) -> None:
    with viewer(folder, (TOKEN,)) as url:
        with tab(browser, url) as page:
            assert "needs a token" in page.locator("main").inner_text()
            page.locator("#token").fill(TOKEN)
            page.keyboard.press("Enter")
            page.wait_for_selector("main[data-ready=runs]")
        with tab(browser, f"{url}/#token={TOKEN}") as page:
            page.wait_for_selector("main[data-ready=runs]")
            assert TOKEN not in page.url
            page.goto(f"{url}/{VIEWS['rollout']}")
            page.wait_for_selector("main[data-ready=rollout]")


def test_no_run_and_then_one(browser: Any, tmp_path: Path) -> None:
    with viewer(tmp_path) as url, tab(browser, url) as page:
        assert "ludus train RECIPE" in page.locator("main").inner_text()
        make_runs(tmp_path)
        page.get_by_role("link", name=OTHER).wait_for()


def test_a_damaged_store_is_told_on_the_page(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "ludus.db").write_bytes(b"x" * 9000)
    with viewer(tmp_path) as url, tab(browser, url) as page:
        text = page.locator("[role=alert]").inner_text()
        assert "The run store cannot be read" in text
        assert "not an SQLite database" in text
        (tmp_path / "ludus.db").unlink()
        make_runs(tmp_path)
        page.get_by_role("button", name="Try again").click()
        page.get_by_role("link", name=OTHER).wait_for()


def test_unknown_things(browser: Any, url: str) -> None:
    with tab(browser) as page:
        page.on("console", lambda _: None)
        page.goto(f"{url}/#/nowhere")
        page.wait_for_selector("main[data-ready=problem]")
        assert "there is no page nowhere" in page.locator("main").inner_text()
