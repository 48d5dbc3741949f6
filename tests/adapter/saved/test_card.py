"""The model card: what the hub's client reads, and what is uploaded."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, ModelCardData
from huggingface_hub.utils import validate_repo_id
from peft import PeftModel

from adapted import adapted
from frozencore import export_lora, write_model_card
from frozencore.adapter.saved.card import begin_model_card
from frozencore.errors import ArtifactError


@pytest.fixture
def named() -> PeftModel:
    """A calibrated model whose base has a hub id."""
    model = adapted("fcca", trained=True)
    model.get_base_model().config._name_or_path = "Qwen/Qwen2.5-0.5B"
    model.peft_config["default"].base_model_name_or_path = "Qwen/Qwen2.5-0.5B"
    return model


def test_save_pretrained_writes_a_card_that_the_hub_client_reads(named: PeftModel, tmp_path: Path) -> None:
    named.save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.library_name == "peft"
    assert card.data.base_model == "Qwen/Qwen2.5-0.5B"
    assert "frozencore" in card.data.tags
    validate_repo_id(card.data.base_model)
    for fact in (
        "`Qwen/Qwen2.5-0.5B`",
        "`fcca`",
        "- Rank: 3",
        "- Trained values: 72\n",
        "- Saved in: ",
        "import frozencore",
        "- Licence: not stated",
        "tokens",
    ):
        assert fact in card.text
    assert "More Information Needed" not in card.text


def test_the_card_counts_the_tokens_of_the_calibration_also_after_reloading(named: PeftModel, tmp_path: Path) -> None:
    named.save_pretrained(tmp_path / "a")
    count = named.peft_config["default"].calibration_tokens
    again = PeftModel.from_pretrained(named.unload(), tmp_path / "a")
    again.save_pretrained(tmp_path / "b")
    assert f"- Calibrated on: {count:,} tokens" in (tmp_path / "b" / "README.md").read_text()


def test_a_card_that_was_begun_before_is_the_same_in_the_end(named: PeftModel, tmp_path: Path) -> None:
    begin_model_card(tmp_path / "begun")
    cards = []
    for folder in (tmp_path / "begun", tmp_path / "not"):
        named.save_pretrained(folder)
        cards.append((folder / "README.md").read_bytes())
    assert cards[0] == cards[1]
    begin_model_card(tmp_path / "begun")
    assert (tmp_path / "begun" / "README.md").read_bytes() == cards[0]


def test_scores_data_and_licence_are_filled_in_when_known(named: PeftModel, tmp_path: Path) -> None:
    named.save_pretrained(tmp_path)
    write_model_card(tmp_path, calibration="svamp, 128 rows", scores={"accuracy": 0.7125}, license="apache-2.0")
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.license == "apache-2.0"
    assert "- Calibrated on: svamp, 128 rows" in card.text
    assert "- Scores: accuracy 0.7125" in card.text
    assert card.text.count("# Frozen-core adapter") == 1


def test_a_card_that_someone_wrote_keeps_its_text(named: PeftModel, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n\nMy own words.\n")
    named.save_pretrained(tmp_path)
    named.save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.license == "mit"
    assert "My own words." in card.text
    assert card.text.count("# Frozen-core adapter") == 1
    assert "- Licence: mit" in card.text


def test_a_local_base_folder_is_not_told_to_the_hub(named: PeftModel, tmp_path: Path) -> None:
    named.get_base_model().config._name_or_path = "/home/someone/models/qwen"
    named.peft_config["default"].base_model_name_or_path = "/home/someone/models/qwen"
    named.save_pretrained(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert ModelCard.load(tmp_path / "README.md").data.base_model is None
    assert "/home/someone" not in text
    assert "a local folder, `qwen`" in text


def test_the_export_has_a_card_without_our_import(named: PeftModel, tmp_path: Path) -> None:
    export_lora(named, tmp_path / "lora")
    card = ModelCard.load(tmp_path / "lora" / "README.md")
    assert card.data.base_model == "Qwen/Qwen2.5-0.5B"
    assert "lora" in card.data.tags
    assert "import frozencore" not in card.text


def test_a_configuration_saved_alone_gets_no_card(named: PeftModel, tmp_path: Path) -> None:
    named.peft_config["default"].save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter_config.json"]
    with pytest.raises(ArtifactError, match="cannot be brought up to date"):
        write_model_card(tmp_path / "nothing")


def test_upload_folder_would_upload_exactly_what_was_written(
    named: PeftModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named.save_pretrained(tmp_path)
    uploaded = _uploads(monkeypatch)
    HfApi().upload_folder(repo_id="someone/mine", folder_path=tmp_path)
    assert uploaded.keys() == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert all(uploaded[name] == (tmp_path / name).read_bytes() for name in uploaded)


@pytest.mark.parametrize("half_filled", [False, True])
def test_a_template_is_replaced_unless_someone_wrote_into_it(
    named: PeftModel, tmp_path: Path, half_filled: bool
) -> None:
    card = ModelCard.from_template(ModelCardData())
    card.data.license = "mit"
    assert "[More Information Needed]" in card.text
    if half_filled:
        card.text = card.text.replace("- **Repository:** [More Information Needed]", "- **Repository:** my own forge")
    card.save(tmp_path / "README.md")
    named.save_pretrained(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "- Licence: mit" in text
    assert ("my own forge" in text) == ("[More Information Needed]" in text) == half_filled


def test_a_saved_model_is_freed_with_its_last_reference(tmp_path: Path) -> None:
    model = adapted("random")
    model.save_pretrained(tmp_path)
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def _uploads(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The files that the client would send, by path in the repository; nothing is sent."""
    uploaded: dict[str, bytes] = {}

    def commit(self: HfApi, repo_id: str, operations: Iterable[CommitOperationAdd], **kwargs: object) -> str:
        for operation in operations:
            with operation.as_file() as file:
                uploaded[operation.path_in_repo] = file.read()
        return repo_id

    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo_id, **kwargs: SimpleNamespace(repo_id=repo_id))
    monkeypatch.setattr("huggingface_hub.hf_api.is_xet_available", lambda: False)  # one commit, through the client
    monkeypatch.setattr(HfApi, "create_commit", commit)
    monkeypatch.setattr(HfApi, "_validate_yaml", lambda self, content, **kwargs: metadata_of(content))
    return uploaded


def metadata_of(content: str) -> dict[str, object]:
    """The metadata that the hub would read from a card; a card without valid YAML raises."""
    return ModelCard(content, ignore_metadata_errors=False).data.to_dict()
