"""What a killed writer leaves is removed, and what it had set aside is not lost."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from safetensors import SafetensorError

from frozencore.errors import ArtifactError
from frozencore.files.atomic_write import atomic_folder, atomic_write, remove_left


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


@pytest.mark.parametrize(("num_renames", "kept"), [(0, "old"), (1, "old"), (2, "new")])
def test_a_replacement_that_is_stopped_leaves_one_whole_folder(
    num_renames: int, kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C before the first rename, between the two, and after both."""
    renamed, rename = list[Path](), Path.rename

    def stop(path: Path, target: Path) -> Path:
        renamed.append(path)
        if len(renamed) == num_renames + 1 and num_renames < 2:
            raise KeyboardInterrupt
        result = rename(path, target)
        if len(renamed) == num_renames == 2:
            raise KeyboardInterrupt
        return result

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("old")
    monkeypatch.setattr(Path, "rename", stop)
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "out", overwrite=True) as aside:
        (aside / "config.json").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "config.json").read_text() == kept


def test_only_temporary_names_of_a_writer_are_removed(tmp_path: Path) -> None:
    others = [".anna.b.0123abcd.tmp", ".anna.draft.tmp", ".anna.notes.old", ".anna.v1.old"]
    for name in (*others, ".anna.0123abcd.tmp"):
        (tmp_path / name).touch()
    remove_left(tmp_path, "anna")
    assert sorted(path.name for path in tmp_path.iterdir()) == others


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("I/O error: File too large")]
)
def test_what_cannot_be_written_is_one_line_with_the_users_path(error: Exception, tmp_path: Path) -> None:
    reason = str(error).removeprefix("[Errno 28] ")
    for write in (atomic_write, partial(atomic_folder, overwrite=False)):
        rule = f"{tmp_path / 'out'} cannot be written: {reason}. Check"
        with pytest.raises(ArtifactError, match=rule), write(tmp_path / "out"):
            raise error
    assert not list(tmp_path.iterdir())


def test_an_error_of_reading_inside_is_not_said_to_be_about_writing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no tokenizer"), atomic_folder(tmp_path / "out", overwrite=False):
        raise OSError("There is no tokenizer.")  # as transformers raises it
