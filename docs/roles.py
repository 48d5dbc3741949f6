"""A hook of the site: the roles of docstrings (``:func:`` and so on) say nothing to a reader."""

from __future__ import annotations

import re

ROLE = re.compile(r":(?:func|class|meth|mod|data|attr|obj):(?=<code>)")


def on_page_content(html: str, **_: object) -> str:
    """The page without them."""
    return ROLE.sub("", html)
