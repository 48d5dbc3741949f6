"""A hook of the site: a page without what only programs and readers of the source need."""

from __future__ import annotations

import re

from mkdocs.structure.pages import Page

ROLE = re.compile(r":(?:func|class|meth|mod|data|attr|obj):(?=<code>)")
PAGE = re.compile(r"(?<![\w/>\"])docs/([\w-]+)\.md")
SETTING = re.compile(r"<code>([-+]?[\d.,]+(?: ?%)?)</code>")


def on_page_content(html: str, page: Page, **_: object) -> str:
    """The page without the roles of docstrings, with links to the pages that docstrings name, and with numbers as text.

    A page puts a number into backticks to say that it is a setting.
    """
    up = "../" * page.url.count("/")
    linked = PAGE.sub(rf'<a href="{up}\1.html">\1</a>', html) if up else html
    return SETTING.sub(r"\1", ROLE.sub("", linked))
