"""Federated averaging of cores by Flower: rows stay with their clients, and Σr² values a client travel.

    frozencore calibrate --model DIR --data public.jsonl --out shop
    python examples/federated.py --model DIR --basis shop/basis --data clients --output out --rounds 8 --share 0.25

``clients`` holds a file ``NAME.jsonl`` for each client, one ``{"prompt": ..., "completion": ...}`` a line. All of them
run on this machine, in Flower's simulation engine. ``client_app`` and ``server_app`` make the two apps that Flower runs
anywhere else too. Needs ``pip install "frozencore[federated]"``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # Flower reads it once, when it is imported
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

from frozencore import FrozenCoreConfig, FrozenCoreError

Row = dict[str, list[int]]


@cache
def on_basis(model: str, basis: str) -> tuple[PeftModel, Any]:
    """The model with a zero core on the basis, and its tokenizer; a process loads them once for all of its clients."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    base = AutoModelForCausalLM.from_pretrained(model)
    return get_peft_model(base, FrozenCoreConfig(basis=basis, task_type="CAUSAL_LM")), tokenizer


def rows_of(file: Path, tokenizer: Any) -> list[Row]:
    """A client's rows as tokens; the loss is on the completion."""
    rows = []
    for one in map(json.loads, filter(str.strip, file.open(encoding="utf-8"))):
        prompt = tokenizer(one["prompt"])["input_ids"]
        completion = [*tokenizer(one["completion"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        rows.append({"input_ids": prompt + completion, "labels": [-100] * len(prompt) + completion})
    if not rows:
        raise FrozenCoreError(f"A client trains on a row at least, but {file} has none. Take it out.")
    return rows


def train_locally(
    model: PeftModel, rows: Sequence[Row], tokenizer: Any, *, rate: float, batch_size: int, seed: str
) -> float:
    """Train once on the rows, in an order drawn by the seed; the mean loss of the batches."""
    collate, order = DataCollatorForSeq2Seq(tokenizer), random.Random(seed).sample(rows, len(rows))
    trained = [parameter for parameter in model.train().parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    losses = []
    for begin in range(0, len(order), batch_size):
        loss = model(**collate(order[begin : begin + batch_size]).to(model.device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def client_app(model: str, basis: str, data: Path) -> ClientApp:
    """A client: it takes the average core, trains it on its own rows and sends it back."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        settings, number = message.content["config"], int(context.node_config["partition-id"])
        adapted, tokenizer = on_basis(model, basis)
        own: Any = adapted.peft_config["default"]
        if own.basis_id != settings["basis"]:
            raise FrozenCoreError(
                f"A core works on its own basis only, but the server's is {settings['basis']} and the one in {basis} "
                f"is {own.basis_id}. Give this client the server's basis."
            )
        file = sorted(data.glob("*.jsonl"))[number]
        rows = rows_of(file, tokenizer)
        set_peft_model_state_dict(adapted, message.content["arrays"].to_torch_state_dict())
        loss = train_locally(
            adapted, rows, tokenizer, rate=settings["rate"], batch_size=settings["batch-size"],
            seed=f"{file.stem} {settings['server-round']}",
        )  # fmt: skip
        core = ArrayRecord(get_peft_model_state_dict(adapted))
        measured = MetricRecord({"loss": loss, "num-examples": len(rows)})  # the second weighs the core in the average
        return Message(RecordDict({"arrays": core, "metrics": measured}), reply_to=message)

    return app


def server_app(
    model: str, basis: str, output: Path, *, clients: int, rounds: int, share: float, rate: float, batch_size: int
) -> ServerApp:
    """The server: rounds of Flower's FedAvg from the zero core; the average is saved as an adapter of cores alone.

    Args:
        clients: So many must be there before a round begins.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        adapted, _ = on_basis(model, basis)
        start = ArrayRecord(get_peft_model_state_dict(adapted))
        strategy = FedAvg(fraction_train=share, fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=clients)
        settings = ConfigRecord(
            {"basis": adapted.peft_config["default"].basis_id, "rate": rate, "batch-size": batch_size}
        )
        result = strategy.start(grid, start, num_rounds=rounds, train_config=settings)
        if len(result.train_metrics_clientapp) < rounds:
            raise FrozenCoreError("A round needs at least one core, but in one of them every client failed: see above.")
        for number, told in result.train_metrics_clientapp.items():
            print(f"round {number}: {start.count_bytes():,} bytes each way a client, loss {told['loss']:.4f}")
        set_peft_model_state_dict(adapted, result.arrays.to_torch_state_dict())
        adapted.save_pretrained(output / "adapter")

    return app


def main() -> None:
    options = parse()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    files = list(options.data.glob("*.jsonl"))
    for file in files:  # a wrong file is found before the first round
        rows_of(file, tokenizer)
    shared = {"model": options.model, "basis": str(options.basis)}
    run_simulation(
        server_app(
            **shared, output=options.output, clients=len(files), rounds=options.rounds, share=options.share,
            rate=options.learning_rate, batch_size=options.batch_size,
        ),
        client_app(**shared, data=options.data),
        num_supernodes=len(files),
        backend_config={
            "init_args": {"num_cpus": options.at_once, "object_store_memory": 2**28},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )  # fmt: skip


def share_of_clients(text: str) -> float:
    """A share, for argparse."""
    if not 0 < (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, but is {text}")
    return value


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Folder or hub id of a language model.")
    parser.add_argument("--basis", type=Path, required=True, help="Folder of a basis that all clients have.")
    parser.add_argument("--data", type=Path, required=True, help="Folder with a file of rows for each client.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--share",
        type=share_of_clients,
        default=1.0,
        help="The share of the clients that train in a round, rounded down.",
    )
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--at-once", type=int, default=1, help="Clients that train at a time; each loads the model.")
    options = parser.parse_args()
    if not any(options.data.glob("*.jsonl")):
        parser.error(f"--data is a folder with a file NAME.jsonl for each client, but {options.data} has none")
    options.basis, options.data, options.output = (
        path.resolve() for path in (options.basis, options.data, options.output)
    )
    return options


if __name__ == "__main__":
    import federated  # by its name, as the processes of the engine import it: each loads the model once

    federated.main()
