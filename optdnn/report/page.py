"""One HTML file that holds all it needs: template, style, scripts, data.

The page asks for nothing from anywhere, and runs no script but its own: a Content-Security-Policy names the digests of these. Texts
are escaped by the template engine, or are data that the scripts write as text. Names come from models, which are untrusted.
Needs jinja2 (extra ``report``).
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from optdnn.errors import MissingDependency, printable
from optdnn.report import words

if TYPE_CHECKING:
    import jinja2

SHOWN_NODES = 200
"""Most names in a cell of a table."""
SCRIPTS = ("layout.js", "details.js", "network.js")
"""The page's own scripts, in their order; the layout library comes before them."""
STYLE = "report.css"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def require_jinja() -> None:
    """Raise MissingDependency where jinja2 is absent."""
    if find_spec("jinja2") is None:
        raise MissingDependency("jinja2", "report", "to write an HTML report")


def source_of(name: str) -> str:
    """The text of a file of this package."""
    return files("optdnn.report").joinpath(name).read_text(encoding="utf-8")


def render(name: str, data: Mapping[str, Any] | None = None, **view: Any) -> str:
    """The page of a template. ``data`` is the input of the scripts; a page without it has no script. Raises MissingDependency."""
    scripts = [] if data is None else [_library(), *map(source_of, SCRIPTS)]
    allowed = "".join(f" '{_digest(text)}'" for text in scripts)
    policy = f"{POLICY}; script-src{allowed}; require-trusted-types-for 'script'" if scripts else POLICY
    return _template(name).render(
        policy=policy, style=source_of(STYLE), scripts=scripts, data=None if data is None else _embedded(data), **view
    )


def _template(name: str) -> jinja2.Template:
    require_jinja()
    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(source_of),
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    filters: dict[str, Callable[..., str]] = {
        "ms": words.milliseconds,
        "err": words.error_text,
        "times": words.times,
        "size": words.bytes_text,
        "joined": partial(words.first_of, most=SHOWN_NODES),
    }
    environment.filters.update(filters)
    return environment.get_template(name)


def _library() -> str:
    """The layout library after its license, without the address of its source map."""
    license_text = source_of("vendor/dagre.min.js.LEGAL.txt").strip()
    code = source_of("vendor/dagre.min.js")
    kept = [line for line in code.splitlines() if not line.startswith(("//# sourceMappingURL", "/*! For license"))]
    return "\n".join([license_text, *kept])


def _digest(text: str) -> str:
    """The source expression of a script in the policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _embedded(data: Mapping[str, Any]) -> str:
    """JSON that no name in it can leave: neither an end tag nor a comment can begin there."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
