"""What a killed writer leaves is removed, and what it had set aside is not lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from frozencore.files.atomic_write import remove_left


@pytest.mark.parametrize(
    ("left", "kept"),
    [
        ({"anna": "old", ".anna.0123abcd.tmp": "new"}, "old"),  # killed before the first rename,
        ({".anna.0123abcd.old": "old", ".anna.0123abcd.tmp": "new"}, "old"),  # between the two,
        ({".anna.0123abcd.old": "old"}, "old"),
        ({"anna": "new", ".anna.0123abcd.old": "old"}, "new"),  # and before the old folder was removed
    ],
)
def test_a_folder_whose_replacement_was_killed_is_the_old_one_or_the_new_one(
    left: dict[str, str], kept: str, tmp_path: Path
) -> None:
    for name, content in left.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "core").write_text(content)
    remove_left(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["anna"]
    assert (tmp_path / "anna" / "core").read_text() == kept
