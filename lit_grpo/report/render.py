"""Pages from their templates, with the style sheet and the script inside."""

from __future__ import annotations

import base64
import hashlib
from datetime import datetime
from pathlib import Path
from typing import Any

from lit_grpo.tracking.charts import short

HERE = Path(__file__).parent


def render(template: str, **values: Any) -> str:
    """Fill in a template of this folder; all values appear as text, whatever they hold."""
    import jinja2
    from markupsafe import Markup

    # autoescape: what a model wrote must appear as text, never as HTML. StrictUndefined: a name that the template
    # misspells raises instead of leaving a gap.
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["number"] = number
    script = (HERE / "script.js.jinja").read_text(encoding="utf-8")
    # The browser runs this script and no other, even if something got past the escaping.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    written = datetime.now().astimezone().isoformat(timespec="seconds")
    return environment.get_template(template).render(
        script=Markup(script), script_hash=Markup(f"sha256-{digest}"), written=written, **values
    )


def number(value: Any) -> str:
    """Write a number with three digits, and anything else as its text."""
    try:
        converted = float(value)
    except (TypeError, ValueError):
        return "-" if value is None else str(value)
    return short(converted)
