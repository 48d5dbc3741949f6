"""The verbs that the lab adds to the ``frozencore`` command."""

from __future__ import annotations

from frozencore.cli.verbs import GOES_ON, Verb

TASK = Verb(
    "task", "frozencore_lab.cli.task:task", "List the tasks, or write the rows of one as JSONL files.",
    ("task", "task sst2 --data-root DATA --out rows"),
)  # fmt: skip
SCHEMA = Verb(
    "schema", "frozencore_lab.cli.campaign:schema", "Print the JSON schema of a campaign's YAML file.",
    "schema > campaign.schema.json",
)  # fmt: skip
CAMPAIGN = Verb(
    "campaign", "frozencore_lab.cli.campaign:campaign_app",
    "Make many runs from one YAML file: plan, rehearse, run, report.",
    "campaign run lab/campaigns/demo.yaml --out runs/demo", when_ended_early=GOES_ON,
)  # fmt: skip
DEMO = Verb(
    "demo", "frozencore_lab.cli.campaign:demo",
    "Adapt the shipped pocket model to its four tasks with every constructor and LoRA, and compare them.",
    "demo", when_ended_early=GOES_ON,
)  # fmt: skip
