"""What is said of an adapter or a basis whose files cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from frozencore.adapter.basis import load_basis, read_header
from frozencore.errors import ArtifactError
from frozencore.files.adapter_folder import find_adapter, read_config


@pytest.mark.parametrize(("read", "name"), [(read_config, "adapter_config.json"), (load_basis, "basis.json")])
def test_a_file_without_the_right_to_read_is_not_called_damaged(
    read: object, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_text("no JSON")
    with pytest.raises(ArtifactError, match="damaged"):
        read(tmp_path)  # type: ignore[operator]
    monkeypatch.setattr("os.access", lambda *_: False)  # as with mode 000; root may read all
    with pytest.raises(ArtifactError, match=f"{name} cannot be read: permission denied"):
        read(tmp_path)  # type: ignore[operator]


@pytest.mark.parametrize("header", ["{}", '{"format": 4, "identity": "a", "options": {}, "scales": {}}'])
def test_a_basis_of_an_earlier_version_is_one_line(header: str, tmp_path: Path) -> None:
    (tmp_path / "basis.json").write_text(header)
    for read in (load_basis, read_header):
        with pytest.raises(ArtifactError, match="basis.json names no id"):
            read(tmp_path)


def test_the_folder_that_is_meant_is_an_adapters_not_that_of_the_basis_beside_it(tmp_path: Path) -> None:
    for place in ("basis/basis.json", "zoe/adapter/adapter_config.json"):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).write_text("{}")
    with pytest.raises(ArtifactError, match=r"It holds 2 folders of adapters: did you mean .*zoe\?"):
        find_adapter(str(tmp_path))
