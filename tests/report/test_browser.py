"""The pages in a real browser: no sideways scroll, no network, nothing that a model wrote runs, a hand can read."""

import base64
import io
import re

import pytest
from PIL import Image

from lit_grpo.report.compare import write_comparison
from lit_grpo.report.page import write_report
from lit_grpo.report.run import read_folder
from tests.report.browser import MISSING, browser
from tests.report.made_up_run import make_run
from tests.report.rich_run import make_rich_run
from tests.report.test_report import HOSTILE

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("run"), say=HOSTILE + "x" * 300)
    return write_report(read_folder(folder), folder)


@pytest.fixture(scope="module")
def rich(tmp_path_factory):
    folder = make_rich_run(tmp_path_factory.mktemp("rich"), say=HOSTILE + "x" * 300)
    return write_report(read_folder(folder), folder)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    root = tmp_path_factory.mktemp("two")
    first = make_rich_run(root / f"a{'x' * 60}", say=HOSTILE)
    second = make_rich_run(root / "<img src=x onerror=alert(1)>", steps=30, lr=f"'{HOSTILE[:20]}'")
    return write_comparison([read_folder(first), read_folder(second)], root / "page")


@pytest.fixture(scope="module")
def desktop(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as session:
        yield session


@pytest.fixture(scope="module")
def phone(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("phone"), 390, 844, phone=True) as session:
        yield session


@pytest.mark.parametrize("name", ["page", "rich", "compared"])
@pytest.mark.parametrize(("device", "width"), [("desktop", 1280), ("phone", 390)])
def test_a_page_fits_asks_for_nothing_and_runs_nothing_foreign(request, tmp_path, name, device, width):
    session, path = request.getfixturevalue(device), request.getfixturevalue(name)
    session.log("browser"), session.requests()
    session.media()
    session.open(path)
    assert session.run("return document.title").endswith("lit-grpo report")
    inner, whole = session.run("return [document.documentElement.clientWidth, document.documentElement.scrollWidth]")
    assert whole <= inner <= width
    wide = session.run(
        "return [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, .plot')"
        " && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName + '.' + e.className)"
    )
    assert wide == []
    assert session.requests() == [path.as_uri()]
    assert session.log("browser") == []
    assert session.run("return document.scripts.length") == 1
    assert session.run("return document.images.length") == 0
    charts = "return [...document.querySelectorAll('.chart > svg')].map(e => e.getBoundingClientRect().width)"
    widths = session.run(charts)
    assert len(widths) > 3
    assert min(widths) > 280
    smallest = (
        "return Math.min(...[...document.querySelectorAll('.chart > svg')].map(e => e.getBoundingClientRect().width"
        " / 400 * parseFloat(getComputedStyle(e.querySelector('text')).fontSize)))"
    )
    assert session.run(smallest) >= 8.5
    session.screenshot(tmp_path / "page.png", whole=True)
    assert Image.open(io.BytesIO((tmp_path / "page.png").read_bytes())).height > 900


def test_tokens_are_marked_by_what_was_chosen(desktop, page):
    desktop.open(page)
    assert desktop.run("return parseFloat(getComputedStyle(document.querySelector('.tokens')).fontSize)") >= 12
    shown = "return [...document.querySelectorAll('.view')].filter(e => e.offsetHeight).map(e => e.className)"
    assert set(desktop.run(shown)) == {"tokens view by-entropy"}
    desktop.run("document.querySelector('label[for=show-advantage]').click()")
    assert set(desktop.run(shown)) == {"tokens view by-advantage"}
    line = (
        "const s = getComputedStyle(document.querySelector('.by-advantage .{0}'));"
        " return [s.borderTopStyle, s.borderBottomStyle]"
    )
    assert desktop.run(line.replace("{0}", "a2")) == ["double", "solid"]
    assert desktop.run(line.replace("{0}", "b2")) == ["solid", "dotted"]


def test_no_script_but_the_page_s_own_can_run(desktop, rich):
    desktop.open(rich)
    inject = (
        "const s = document.createElement('script'); s.textContent = 'document.title = 1'; document.body.append(s);"
    )
    assert desktop.run(inject + " return document.title").endswith("lit-grpo report")
    (refused,) = desktop.log("browser")
    assert "Content Security Policy" in refused["message"]


TIP = "const t = document.querySelector('#chart-reward .tip'); return t.hidden ? null : t.innerText"
VIEW = "const v = document.querySelector('#chart-{}').querySelector('.plot').viewBox.baseVal; return [v.x, v.width]"


def plot_box(session):
    """Return a function from a share of the plot's width to a point of the window, a quarter down the plot."""
    session.run("document.querySelector('#chart-reward').scrollIntoView({block: 'center'})")
    left, top, width = session.run(
        "const b = document.querySelector('#chart-reward > svg').getBoundingClientRect();"
        " return [b.left, b.top, b.width]"
    )
    scale = width / 400
    return lambda share: (left + (52 + 340 * share) * scale, top + 50 * scale)


@pytest.mark.parametrize(("share", "step", "reward"), [(0.0, 1, "0"), (29 / 59, 30, "0.492"), (1.0, 60, "1")])
def test_a_curve_is_read_by_pointing_at_it(desktop, rich, share, step, reward):
    desktop.open(rich)
    place = plot_box(desktop)
    desktop.mouse("mouseMoved", *place(min(max(share, 0.002), 0.998)))
    held_out = {"0": "0.0763 (step 10)", "0.492": "0.246", "1": "0.5"}[reward]
    assert desktop.run(TIP).splitlines() == [f"step {step}", f"training {reward}", f"held out {held_out}"]
    desktop.mouse("mouseMoved", 2, 2)
    assert desktop.run(TIP) is None


def test_a_drag_zooms_all_curves_and_a_double_click_goes_back(desktop, rich):
    desktop.open(rich)
    place = plot_box(desktop)
    ticks = "return [...document.querySelectorAll('#chart-reward .grid-{} text')].map(e => e.textContent)"
    before = desktop.run(ticks.replace("{}", "x")), desktop.run(ticks.replace("{}", "y"))
    desktop.mouse("mouseMoved", *place(0.25))
    desktop.mouse("mousePressed", *place(0.25), clicks=1)
    desktop.mouse("mouseMoved", *place(0.5))
    assert desktop.run("return document.querySelectorAll('.choice').length") == 1
    desktop.mouse("mouseReleased", *place(0.5), clicks=1)
    for name in ("reward", "entropy"):
        x, width = desktop.run(VIEW.replace("{}", name))
        assert (x, width) == (pytest.approx(250, abs=4), pytest.approx(250, abs=8))
    assert desktop.run("return document.querySelectorAll('.choice').length") == 0
    numbers = [int(text) for text in desktop.run(ticks.replace("{}", "x"))]
    assert 15 <= min(numbers) < max(numbers) <= 31
    # The upright axis follows what is to be seen, training from 0.25 to 0.5 and held out from 0.16.
    heights = [float(text) for text in desktop.run(ticks.replace("{}", "y"))]
    assert 0.1 < min(heights) < max(heights) < 0.55
    desktop.mouse("mouseMoved", *place(0.52))
    assert desktop.run(TIP).startswith("step 23\n")
    for clicks in (1, 2):
        desktop.mouse("mousePressed", *place(0.4), clicks=clicks)
        desktop.mouse("mouseReleased", *place(0.4), clicks=clicks)
    assert desktop.run(VIEW.replace("{}", "entropy")) == [0, 1000]
    assert desktop.run(ticks.replace("{}", "x")) == before[0]
    assert desktop.run(ticks.replace("{}", "y")) == before[1], "script and server write the same ticks"


def test_the_keyboard_reads_and_zooms_too(desktop, rich):
    desktop.open(rich)
    press = "document.querySelector('#chart-reward').dispatchEvent(new KeyboardEvent('keydown', {key: '%s'}))"
    desktop.run(press % "ArrowRight")
    assert desktop.run(TIP).startswith("step 31\n")
    desktop.run(press % "+")
    assert desktop.run(VIEW.replace("{}", "reward"))[1] == pytest.approx(500, abs=10)
    assert desktop.run("return document.getElementById('reset-zoom').offsetHeight") > 0
    desktop.run("document.getElementById('reset-zoom').click()")
    assert desktop.run(VIEW.replace("{}", "reward"))[1] == 1000
    assert desktop.run("return document.getElementById('reset-zoom').offsetHeight") == 0


def test_runs_are_read_side_by_side(desktop, compared):
    desktop.open(compared)
    place = plot_box(desktop)
    desktop.mouse("mouseMoved", *place(29 / 59))
    lines = desktop.run(TIP).splitlines()
    assert lines == ["step 30", f"a{'x' * 60} 0.492", "<img src=x onerror=alert(1)> 1"]


def test_completions_are_searched_and_put_in_order(desktop, rich):
    desktop.open(rich)
    seen = "return [...document.querySelectorAll('.group .one')].filter(e => e.offsetHeight).length"
    assert desktop.run(seen) == 24
    find = (
        "const s = document.getElementById('search'); s.value = '{}'; s.dispatchEvent(new Event('input'));"
        " return document.getElementById('found').textContent"
    )
    assert desktop.run(find.replace("{}", "SAID 2-1-3")) == "1 completion"
    assert desktop.run(seen) == 1
    # A prompt that fits shows its whole group.
    assert desktop.run(find.replace("{}", "1+0=?")) == "4 completions"
    assert desktop.run(find.replace("{}", "nowhere")) == "0 completions"
    assert desktop.run("return document.getElementById('none-found').offsetHeight") > 0
    assert desktop.run(find.replace("{}", "")) == "24 completions"
    order = (
        "const o = document.getElementById('order'); o.value = '{}'; o.dispatchEvent(new Event('change'));"
        " return [...document.querySelectorAll('.group')].map(e => Number(e.dataset.rollout))"
    )
    assert desktop.run(order.replace("{}", "oldest")) == [1, 1, 11, 11, 21, 21]
    assert desktop.run(order.replace("{}", "newest")) == [21, 21, 11, 11, 1, 1]


def test_a_group_stands_side_by_side(desktop, phone, rich):
    columns = (
        "return new Set([...document.querySelector('.answers').children].map(e => e.getBoundingClientRect().left)).size"
    )
    desktop.open(rich)
    assert desktop.run(columns) == 4
    phone.open(rich)
    assert phone.run(columns) == 1


def luminance(colour):
    channels = [int(c) / 255 for c in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["page", "rich"])
def test_text_can_be_read_in_both_schemes(request, desktop, name, scheme):
    desktop.media(scheme=scheme)
    desktop.open(request.getfixturevalue(name))
    pairs = desktop.run(
        "const back = e => { for (; e; e = e.parentElement) { const b = getComputedStyle(e).backgroundColor;"
        " if (b !== 'rgba(0, 0, 0, 0)') return b; } };"
        "return [...document.querySelectorAll('h1,h2,p,td,dt,dd,.facts,.prompt,.said,.t,a,figcaption,text')].map(e => {"
        " const s = getComputedStyle(e); return [e.tagName, e instanceof SVGElement ? s.fill : s.color, back(e)]; })"
    )
    desktop.media()
    assert (luminance(pairs[0][2]) < 0.1) == (scheme == "dark")
    poor = set()
    for tag, ink, paper in pairs:
        high, low = sorted((luminance(ink), luminance(paper)), reverse=True)
        if (high + 0.05) / (low + 0.05) < 4.5:
            poor.add((tag, ink, paper))
    assert not poor


def test_paper(desktop, rich):
    desktop.open(rich)
    desktop.media("print")
    hidden = desktop.run("return ['nav', '#tools'].map(s => document.querySelector(s).offsetHeight)")
    whole = desktop.run("const g = document.getElementById('groups'); return g.scrollHeight - g.clientHeight")
    desktop.media()
    assert hidden == [0, 0]
    assert whole <= 1
    pdf = base64.b64decode(desktop.cdp("Page.printToPDF")["data"])
    assert pdf.startswith(b"%PDF")
    # The configuration lies in a closed part of the page, which paper cannot open.
    assert desktop.run("return document.querySelector('details').open")
