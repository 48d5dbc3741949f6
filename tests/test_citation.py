"""The files that GitHub reads beside the code: the citation and the issue templates."""

from __future__ import annotations

import tomllib

import pytest
import yaml

from places import ROOT


def test_the_citation_names_the_package_its_version_and_its_licence() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # what its format asks for
    assert [citation[name] for name in ("title", "version", "license")] == [
        project["name"], project["version"], project["license"],
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["bug", "idea"])
def test_an_issue_template_has_a_name_and_fields_with_labels(name: str) -> None:
    template = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    assert template["name"]
    assert template["description"]
    fields = [field for field in template["body"] if field["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields)
