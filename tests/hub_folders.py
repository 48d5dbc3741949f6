"""Rows shaped exactly as the hub's, for the tasks whose data are not beside this checkout, and folders of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, Features, Sequence, Value

from frozencore.tune.suite import find_task

TEXT = Value("string")
PAIR = {"sentence1": TEXT, "sentence2": TEXT, "idx": Value("int32")}
FEATURES = {
    "rte": Features({**PAIR, "label": ClassLabel(names=["entailment", "not_entailment"])}),
    "mrpc": Features({**PAIR, "label": ClassLabel(names=["not_equivalent", "equivalent"])}),
    "openbookqa": Features(
        {
            "id": TEXT,
            "question_stem": TEXT,
            "choices": {"text": Sequence(TEXT), "label": Sequence(TEXT)},
            "answerKey": TEXT,
        }
    ),
    "winogrande": Features({"sentence": TEXT, "option1": TEXT, "option2": TEXT, "answer": TEXT}),
}
ROWS: dict[str, dict[str, Any]] = {
    "rte": {
        "sentence1": "No Weapons of Mass Destruction Found in Iraq Yet.",
        "sentence2": "Weapons of Mass Destruction Found in Iraq.",
        "label": 1,
        "idx": 0,
    },
    "mrpc": {
        "sentence1": "He said the foodservice pie business doesn 't fit the company 's long-term growth strategy .",
        "sentence2": '" The foodservice pie business does not fit our long-term growth strategy .',
        "label": 1,
        "idx": 1,
    },
    "openbookqa": {
        "id": "7-980",
        "question_stem": "The sun is responsible for",
        "choices": {
            "text": ["puppies learning new tricks", "children growing up and getting old", "flowers wilting in a vase",
                     "plants sprouting, blooming and wilting"],
            "label": ["A", "B", "C", "D"],
        },
        "answerKey": "D",
    },
    "winogrande": {
        "sentence": "John moved the couch from the garage to the backyard to create space. The _ is small.",
        "option1": "garage",
        "option2": "backyard",
        "answer": "1",
    },
}  # fmt: skip
VARIED = {"rte": "sentence1", "mrpc": "sentence1", "openbookqa": "question_stem", "winogrande": "sentence"}


def write_hub_folder(root: Path, name: str, num_train: int, num_evaluation: int, **changes: Any) -> None:
    """The data set of a task as it lies on the hub: Parquet files and a card that names the configuration."""
    source = find_task(name).source
    folder = root / source.path  # type: ignore[attr-defined]
    config = source.config  # type: ignore[attr-defined]
    splits = {"train": num_train, source.evaluation_split: num_evaluation}  # type: ignore[attr-defined]
    card = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    for split, count in splits.items():
        varied = [
            {**ROWS[name], **changes, VARIED[name]: f"{ROWS[name][VARIED[name]]} {split} {i}"} for i in range(count)
        ]
        (folder / config).mkdir(parents=True, exist_ok=True)
        Dataset.from_list(varied, features=FEATURES[name]).to_parquet(folder / config / f"{split}.parquet")
        card += [f"  - split: {split}", f"    path: {config}/{split}.parquet"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]))
