"""The clients of the comparison of federated averaging: rows, a model with a contestant's adapter, and their app.

Twenty clients hold 12 rows each of two tasks; the shares of the tasks and their labels are drawn for each client from a
Dirichlet distribution. The bases are calibrated on public rows that no client has.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

import numpy as np
import torch
from federated import train_locally
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

from contestants import ATTENTION, RANK
from frozencore import FrozenCoreConfig, calibrate, save_basis
from frozencore.tune.rows import Example
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.token_batches import make_batches
from frozencore.tune.run.models import load_model
from frozencore.tune.suite import find_task
from frozencore.tune.tasks.splits import split_task

CORES, LORAS = 5e-3, 2e-3  # where the searches begin
LORA_SB = {"constructor": "signgrad", "coordinates": "qr"}  # Fed-SB averages cores on the bases of LoRA-SB
CONTESTANTS: Mapping[str, tuple[Mapping[str, Any], float]] = {
    "core, FCCA": ({"constructor": "fcca"}, CORES),
    "core, Fed-SB's bases": (LORA_SB, CORES),
    "LoRA, r = 1": ({"lora": 1}, LORAS),
    "LoRA, r = 16": ({"lora": 16}, LORAS),
}


@dataclass(frozen=True)
class Plan:
    """The sizes of the study; rows are numbers per task, except those of a client."""

    model: str = "smollm2"
    tasks: tuple[str, ...] = ("sst2", "cola")
    data_root: str | None = None
    folder: str = ""
    clients: int = 20
    rows_a_client: int = 12
    concentration: float = 0.3
    clients_a_round: int = 5
    rounds: int = 12
    batch_size: int = 4
    public_rows: int = 32
    scored_rows: int = 100
    score_every: int = 3
    seeds: tuple[int, ...] = (42, 43, 44)


QUICK = Plan(
    model="pocket", tasks=("pocket-sentiment", "pocket-entailment"), clients=4, rows_a_client=4, clients_a_round=2,
    rounds=2, score_every=1, public_rows=4, scored_rows=4, seeds=(42, 43),
)  # fmt: skip


@cache
def rows_of(plan: Plan) -> dict[str, list[Example]]:
    """The rows by use: public, validation, test, and the pool of the clients; no text stands in two of them."""
    rows: dict[str, list[Example]] = {"public": [], "validation": [], "test": [], "pool": []}
    for name in plan.tasks:
        splits = split_task(find_task(name), None if plan.data_root is None else Path(plan.data_root))
        rows["public"] += splits.train[: plan.public_rows]
        rows["pool"] += [replace(row, id=f"{name}-{row.id}") for row in splits.train[plan.public_rows :]]
        rows["validation"] += splits.validation[: plan.scored_rows]
        rows["test"] += splits.evaluation[: plan.scored_rows]
    return rows


@cache
def rows_of_clients(plan: Plan, seed: int) -> list[list[Example]]:
    """Each client's rows; no two clients share one."""
    drawn = np.random.default_rng(seed)
    kinds: dict[tuple[str, ...], list[Example]] = {}
    for row in rows_of(plan)["pool"]:
        kinds.setdefault((*row.choices, row.completion), []).append(row)
    pools = [[rows[i] for i in drawn.permutation(len(rows))] for _, rows in sorted(kinds.items())]
    clients = []
    for _ in range(plan.clients):
        shares = drawn.dirichlet([plan.concentration] * len(pools))
        chosen = drawn.choice(len(pools), plan.rows_a_client, p=shares)
        clients.append([pools[kind].pop() for kind in chosen])
    return clients


@cache
def adapted(plan: Plan, contestant: str) -> tuple[PeftModel, PromptEncoder]:
    """The model with the contestant's adapter; a process loads it once. The basis is made where there is none."""
    torch.manual_seed(0)
    base, tokenizer = load_model(plan.model, device="cpu")
    encoder = PromptEncoder(tokenizer, style="plain")
    options, _ = CONTESTANTS[contestant]
    if "lora" in options:
        rank = options["lora"]
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=list(ATTENTION), task_type="CAUSAL_LM")
        return get_peft_model(base, config), encoder
    basis = Path(plan.folder) / "bases" / options["constructor"]
    if basis.exists():
        return get_peft_model(base, FrozenCoreConfig(basis=str(basis), task_type="CAUSAL_LM")), encoder
    model = get_peft_model(base, FrozenCoreConfig(r=RANK, task_type="CAUSAL_LM", **options))
    rows = encoder.training_rows([encoder.render(row) for row in rows_of(plan)["public"]])
    calibrate(model, make_batches(rows, pad_id=encoder.pad_id, batch_size=8), progress=False)
    save_basis(model, basis, calibrated_on=f"{len(rows)} public rows of {' and '.join(plan.tasks)}")
    return model, encoder


def client_app(plan: Plan) -> ClientApp:
    app = ClientApp()

    @app.query()
    def number(message: Message, context: Context) -> Message:
        told = MetricRecord({"number": int(context.node_config["partition-id"])})
        return Message(RecordDict({"told": told}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        asked, own = message.content["config"], int(context.node_config["partition-id"])
        model, encoder = adapted(plan, asked["contestant"])
        texts = [encoder.render(row) for row in rows_of_clients(plan, asked["seed"])[own]]
        set_peft_model_state_dict(model, message.content["arrays"].to_torch_state_dict())
        loss = train_locally(
            model, encoder.training_rows(texts), encoder.pad_id, rate=asked["rate"], batch_size=plan.batch_size,
            seed=f"{asked['seed']} {asked['server-round']} {own}",
        )  # fmt: skip
        told = MetricRecord({"loss": loss, "num-examples": len(texts)})
        return Message(
            RecordDict({"arrays": ArrayRecord(get_peft_model_state_dict(model)), "told": told}), reply_to=message
        )

    return app
