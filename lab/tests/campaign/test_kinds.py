"""The kinds of study, and where their names may stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from frozencore_lab.campaign.kinds import KINDS
from frozencore_lab.campaign.spec import Campaign, read_campaign
from places import LAB, ROOT
from small_campaign import write_spec

OPTIONS: dict[str, Any] = {"model": "pocket", "task": "pocket-math", "seed": 42}


def test_only_their_own_file_compares_names_of_kinds() -> None:
    names = re.compile("|".join(f'== "{name}"|!= "{name}"' for name in KINDS))
    files = [path for root in (ROOT, LAB) for path in (root / "src").rglob("*.py") if path.name != "kinds.py"]
    assert not [str(path) for path in files if names.search(path.read_text(encoding="utf-8"))]


def test_a_specification_is_written_with_the_names_and_read_with_the_kinds(tmp_path: Path) -> None:
    campaign = read_campaign(write_spec(tmp_path))
    kinds = {name: study.kind for name, study in campaign.studies.items()}
    assert kinds == {"main": KINDS["tune"], "stability": KINDS["stability"]}
    written = campaign.model_dump(mode="json")["studies"]
    assert {name: study["kind"] for name, study in written.items()} == {"main": "tune", "stability": "stability"}
    assert Campaign.model_validate_json(campaign.model_dump_json(), strict=True) == campaign
    schema = Campaign.model_json_schema()["$defs"]["Study"]["properties"]["kind"]
    assert schema == {"default": "tune", "enum": list(KINDS), "title": "Kind", "type": "string"}
