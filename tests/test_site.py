"""The documentation as a site: every page is in it, and every public name and every verb has its place."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import frozencore
from fixtures import ROOT
from frozencore.cli.verbs import all_verbs

pytest.importorskip("mkdocs", reason="`make docs` installs what the site needs")
QUIET = {"NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    built = subprocess.run(words, cwd=ROOT, env=os.environ | QUIET, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-2000:]
    return out


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_holds_every_page_name_and_verb(site: Path) -> None:
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / page.with_suffix(".html").name).exists() or page.stem == "python"
    assert "campaign rehearse" in (site / "campaigns.html").read_text()
    python = (site / "reference" / "python.html").read_text()
    for name in frozencore.__all__:
        assert re.search(rf'<h3 id="[\w.]*\b{name}"', python), name
    first, second, *_ = re.findall(r'<h3 id="[\w.]*\.(\w+)"', python)
    assert (first, second) == ("calibrate", "FrozenCoreConfig")
    verbs = (site / "reference" / "command-line.html").read_text()
    assert all(f'id="frozencore-{verb.name}"' in verbs for verb in all_verbs())
    assert "--learning-rate" in verbs
    assert "many-tenants.md" in (site / "llms.txt").read_text()


@pytest.mark.slow
def test_no_page_links_to_what_is_not_there(site: Path) -> None:
    for page in site.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="([^"#?:]+)["#?]', page.read_text()):
            if page.name != "404.html":
                assert (page.parent / link).exists(), (page.name, link)


@pytest.mark.slow
def test_no_page_loads_a_script_a_style_a_font_or_an_image_from_another_host(site: Path) -> None:
    pages, styles = list(site.rglob("*.html")), list(site.rglob("*.css"))
    assert len(pages) > 10
    assert styles
    for page in pages:
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*>|<link\b[^>]*>", page.read_text())
        assert not [tag for tag in loaded if re.search(r"""(?:src|href)=["']?(?:https?:)?//""", tag)], page.name
    for style in styles:
        assert not re.search(r"""(?:url\(|@import)\s*["']?(?:https?:)?//""", style.read_text()), style.name


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="Chromium opens the pages")
def test_the_search_works_from_the_disk_and_without_a_network(site: Path) -> None:
    for page in ("index.html", "reference/python.html"):
        words = ["chromium", "--headless", "--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND"]
        words += ["--virtual-time-budget=10000", "--dump-dom", f"{(site / page).as_uri()}?q=export_lora"]
        shown = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout
        assert re.search(r"\d+ matching documents", shown)
        assert "reference/python.html#frozencore.adapter.export.lora.export_lora" in shown
