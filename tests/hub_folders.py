"""Rows shaped exactly as the hub's, and folders of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, Features, Sequence, Value

from frozencore.tune.task_registry import find_task

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
    "svamp": {
        "ID": "chal-777",
        "Type": "Common-Division",
        "Equation": "( 290.0 / 2.0 )",
        "Answer": "145",
        "Body": "There are 87 oranges and 290 bananas in Philip's collection, which are organized into 2 groups",
        "Question": "How big is each group of bananas?",
        "question_concat": "There are 87 oranges [...]. How big is each group of bananas?",
    },
    "gsm8k": {
        "question": "Weng earns $12 an hour for babysitting. How much did she earn in 50 minutes?",
        "answer": "She earned 12/60 = $<<12/60=0.2>>0.2 per minute.\n0.2 x 50 = $<<0.2*50=10>>10.\n#### 10",
    },
    "sst2": {
        "sentence": "it 's a charming and often affecting journey . ",
        "label": 1,
        "idx": 0,
    },
    "qnli": {
        "question": "What happens if a plant looses roots or its shoots?",
        "sentence": "In fact it is possible to grow an entire plant from a single leaf [...]",
        "label": 1,
        "idx": 3,
    },
    "cola": {
        "sentence": "The more we study verbs, the crazier they get.",
        "label": 1,
        "idx": 3,
    },
    "arc_challenge": {
        "id": "Mercury_7041615",
        "question": "Why did many plants and animals die out at the end of the Mesozoic era?",
        "choices": {"text": ["disease", "new mountains", "rise of mammals", "an asteroid"], "label": [*"ABCD"]},
        "answerKey": "D",
    },
    "hellaswag": {
        "ind": 12,
        "activity_label": "Baking cookies",
        "ctx_a": "A large tray of cake is flipped over and placed on counter.",
        "ctx_b": "a large tray of meat",
        "ctx": "A large tray of cake is flipped over and placed on counter. a large tray of meat",
        "endings": ["is placed onto a potato.", ", ls, and pickles are placed.", "is poured.", "is prepared."],
        "source_id": "activitynet~v_-2dxp-mv2zo",
        "split": "train",
        "split_type": "indomain",
        "label": "3",
    },
}  # fmt: skip
VARIED = {
    "rte": "sentence1", "mrpc": "sentence1", "openbookqa": "question_stem", "winogrande": "sentence", "svamp": "Body",
    "gsm8k": "question", "sst2": "sentence", "qnli": "question", "cola": "sentence", "arc_challenge": "question",
    "hellaswag": "ctx",
}  # fmt: skip


def write_hub_folder(
    root: Path, name: str, num_train: int, num_evaluation: int, num_validation: int = 0, **changes: Any
) -> None:
    """The data set of a task as it lies on the hub: Parquet files and a card that names the configurations."""
    source: Any = find_task(name).source
    folder, config = root / source.path, source.config or "default"
    splits = {"train": num_train, source.splits["evaluation"]: num_evaluation}
    if num_validation and "validation" in source.splits:
        splits[source.splits["validation"]] = num_validation
    (folder / config).mkdir(parents=True, exist_ok=True)
    for split, count in splits.items():
        column = VARIED[name]
        rows = [{**ROWS[name], **changes, column: f"{ROWS[name][column]} {split} {i}"} for i in range(count)]
        Dataset.from_list(rows, features=FEATURES.get(name)).to_parquet(folder / config / f"{split}.parquet")
    card = ["---", "configs:"]
    for place in sorted(path for path in folder.iterdir() if path.is_dir()):
        card += [f"- config_name: {place.name}", "  data_files:"]
        for file in sorted(place.iterdir()):
            card += [f"  - split: {file.stem}", f"    path: {place.name}/{file.name}"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]))
