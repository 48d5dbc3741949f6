"""The model card of a saved adapter: facts that the hub's client reads, beside the words of a person."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.utils import validate_repo_id
from peft import PeftModel

from frozencore import export_lora, load_basis, merge_adapters, save_basis, write_model_card
from frozencore.adapter.card import begin_model_card
from tiny import adapted, on_one_basis, set_values


@pytest.fixture
def named() -> PeftModel:
    """A calibrated model whose base has a hub id."""
    model = adapted("fcca", trained=True)
    model.get_base_model().config._name_or_path = "Qwen/Qwen2.5-0.5B"
    model.peft_config["default"].base_model_name_or_path = "Qwen/Qwen2.5-0.5B"
    return model


def test_save_pretrained_writes_a_card_that_the_hub_client_reads(named: PeftModel, tmp_path: Path) -> None:
    named.save_pretrained(tmp_path)
    files = {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == files  # what upload_folder would upload
    card = ModelCard((tmp_path / "README.md").read_text(), ignore_metadata_errors=False)
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
    save_basis(named, tmp_path / "basis")
    named.save_pretrained(tmp_path / "cores")
    assert "- Trained values: 72\n" in (tmp_path / "cores" / "README.md").read_text()


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
    tokens = f"- Calibrated on: {named.peft_config['default'].calibration_tokens:,} tokens"
    again = PeftModel.from_pretrained(named.unload(), tmp_path)
    again.save_pretrained(tmp_path)
    assert tokens in (tmp_path / "README.md").read_text()
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


def test_an_export_has_a_card_without_our_import_and_a_configuration_alone_none(
    named: PeftModel, tmp_path: Path
) -> None:
    export_lora(named, tmp_path / "lora")
    card = ModelCard.load(tmp_path / "lora" / "README.md")
    assert card.data.base_model == "Qwen/Qwen2.5-0.5B"
    assert "lora" in card.data.tags
    assert "import frozencore" not in card.text
    named.peft_config["default"].save_pretrained(tmp_path / "alone")
    assert [path.name for path in (tmp_path / "alone").iterdir()] == ["adapter_config.json"]
    with pytest.raises(FileNotFoundError):
        write_model_card(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("task", "loaded"),
    [
        ("CAUSAL_LM", "transformers import AutoModelForCausalLM"),
        ("SEQ_CLS", "transformers import AutoModelForSequenceClassification"),
        ("SEQ_2_SEQ_LM", "transformers import AutoModelForSeq2SeqLM"),
        (None, "transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM"),
    ],
)
def test_a_card_loads_the_base_model_in_the_class_of_its_task(task: str | None, loaded: str, tmp_path: Path) -> None:
    adapted("random").save_pretrained(tmp_path)
    set_values(tmp_path, **{"task_type": task} | ({"auto_mapping": None} if task else {}))
    write_model_card(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert f"from {loaded}\n" in text
    assert f"base = {loaded.split()[-1]}.from_pretrained(" in text


def test_the_card_of_a_tenant_says_which_basis_it_needs(tmp_path: Path) -> None:
    on_one_basis("anna", place=tmp_path / "basis").save_pretrained(tmp_path)
    write_model_card(tmp_path / "anna")
    text = (tmp_path / "anna" / "README.md").read_text()
    assert f"- Basis: `{load_basis(tmp_path / 'basis').id}`\n" in text
    assert 'PeftModel.from_pretrained(base, "ADAPTER", basis="BASIS")' in text
    assert str(tmp_path) not in text


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


def test_a_card_names_no_folder_of_its_writer_and_a_sum_has_no_scores(named: PeftModel, tmp_path: Path) -> None:
    named.save_pretrained(tmp_path / "mine")
    write_model_card(tmp_path / "mine", scores={"accuracy": 0.7})
    export_lora(tmp_path / "mine", tmp_path / "lora")
    merge_adapters([tmp_path / "mine"], tmp_path / "sum")
    for folder in ("mine", "lora", "sum"):
        card = (tmp_path / folder / "README.md").read_text()
        assert 'PeftModel.from_pretrained(base, "ADAPTER")' in card
        assert str(tmp_path) not in card
        assert ("Scores: accuracy 0.7" in card) == (folder == "mine"), "a sum was not scored"
