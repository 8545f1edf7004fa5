"""The page in a real browser: no sideways scroll, no network, nothing that a model wrote runs."""

import io

import pytest
from PIL import Image

from lit_grpo.report.page import write_report
from lit_grpo.report.run import read_folder
from tests.report.browser import CHROMIUM, DRIVER, browser
from tests.report.made_up_run import make_run
from tests.report.test_report import HOSTILE

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed (apt-get install chromium-driver)"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("run"), say=HOSTILE + "x" * 300)
    return write_report(read_folder(folder), folder)


@pytest.mark.parametrize(("width", "phone"), [(1280, False), (390, True)])
def test_the_page_in_a_browser(page, tmp_path, width, phone):
    with browser(tmp_path / "profile", width, 844, phone) as session:
        session.open(page)
        assert session.run("return document.title").endswith("lit-grpo report")
        inner, whole = session.run(
            "return [document.documentElement.clientWidth, document.documentElement.scrollWidth]"
        )
        assert whole <= inner <= width
        wide = session.run(
            "return [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll')"
            " && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName + '.' + e.className)"
        )
        assert wide == []
        assert session.requests() == [page.as_uri()]
        assert session.log("browser") == []
        assert session.run("return [...document.images].every(i => i.complete && i.naturalWidth > 500)")
        size = "return parseFloat(getComputedStyle(document.querySelector('.tokens')).fontSize)"
        assert session.run(size) >= 12

        shown = "return [...document.querySelectorAll('.view')].filter(e => e.offsetHeight).map(e => e.className)"
        assert set(session.run(shown)) == {"tokens view by-entropy"}
        session.run("document.querySelector('label[for=show-advantage]').click()")
        assert set(session.run(shown)) == {"tokens view by-advantage"}
        line = (
            "const s = getComputedStyle(document.querySelector('.by-advantage .{0}'));"
            " return [s.borderTopStyle, s.borderBottomStyle]"
        )
        assert session.run(line.replace("{0}", "a2")) == ["double", "solid"]
        assert session.run(line.replace("{0}", "b2")) == ["solid", "dotted"]
        session.screenshot(tmp_path / "page.png", whole=True)
        picture = Image.open(io.BytesIO((tmp_path / "page.png").read_bytes()))
        assert picture.height > 1500
