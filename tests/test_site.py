"""The documentation as a site: every page is in it, and every public name and every verb has its place."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import frozencore
from frozencore.cli.verbs import all_verbs
from places import ROOT

pytest.importorskip("mkdocs", reason="`make docs` installs what the site needs")
QUIET = {"NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import os

    out = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    built = subprocess.run(words, cwd=ROOT, env=os.environ | QUIET, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-2000:]
    return out


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_holds_every_page_name_and_verb(site: Path) -> None:
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / page.with_suffix(".html").name).exists()
    assert "export_lora" in (site / "first-hour.html").read_text()
    python = (site / "reference" / "python.html").read_text()
    for name in frozencore.__all__:
        assert re.search(rf'<h2 id="[\w.]*\b{name}"', python), name
    verbs = (site / "reference" / "command-line.html").read_text()
    assert all(f'id="frozencore-{verb.name}"' in verbs for verb in all_verbs())
    assert "--learning-rate" in verbs
    assert "many-cores.md" in (site / "llms.txt").read_text()


@pytest.mark.slow
def test_no_page_links_to_what_is_not_there(site: Path) -> None:
    for page in site.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="([^"#?:]+)["#?]', page.read_text()):
            if page.name != "404.html":
                assert (page.parent / link).exists(), (page.name, link)
