"""Federated averaging on SmolLM2 by Flower, with clients whose rows differ: cores against LoRAs.

    make federated
    nice -n 5 .engines/flower/bin/python benchmarks/federated_smollm2.py --data-root DATA --folder runs/federated
    .engines/flower/bin/python benchmarks/federated_smollm2.py --quick --folder runs/quick

It goes on where it stopped. Twenty clients hold 12 rows each of two tasks; the shares of the tasks and their labels are
drawn for each client from a Dirichlet distribution. Five clients train in a round, once over their rows, and FedAvg
averages what they send. The bases are calibrated on public rows that no client has. All contestants have the same
clients, rows and steps; the learning rate of each has the lowest loss on validation rows, with the first seed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

import numpy as np
import torch
from federated import train_locally
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

from contestants import ATTENTION, RANK
from frozencore import FrozenCoreConfig, calibrate, save_basis
from frozencore.files.fingerprint import fingerprint_options
from frozencore.files.whole_file import write_json
from frozencore.tune.rows import Example
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.token_batches import make_batches
from frozencore.tune.run.models import load_model
from frozencore.tune.scoring.choice import predict_choices
from frozencore.tune.suite import find_task
from frozencore.tune.tasks.splits import split_task
from harness import parser_of, write_found

CORES, LORAS = (1e-2, 5e-3, 2e-2), (4e-3, 8e-3, 2e-3)  # those of docs/smollm2.md first
LORA_SB = {"constructor": "signgrad", "coordinates": "qr"}  # Fed-SB averages cores on the bases of LoRA-SB
STAGES = ((1, 1), (2, 1), (3, 1), (3, 2), (3, 3))  # rates and seeds; the results are written after each
CONTESTANTS: Mapping[str, tuple[Mapping[str, Any], tuple[float, ...]]] = {
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
    rounds: int = 6
    batch_size: int = 4
    public_rows: int = 32
    scored_rows: int = 100
    score_every: int = 6
    seeds: tuple[int, ...] = (42, 43, 44)


QUICK = Plan(
    model="pocket", tasks=("pocket-sentiment", "pocket-entailment"), clients=4, rows_a_client=4, clients_a_round=2,
    rounds=2, score_every=1, public_rows=4, scored_rows=4, seeds=(42, 43),
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One federated training."""

    contestant: str
    rate: float
    seed: int


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


class Drawn(FedAvg):
    """FedAvg with clients drawn by a seed, and the error that averaging makes.

    Attributes:
        errors: Of each round the norm of what averaging the factors adds to the mean update, over the norm of the
            round's mean change; zero for cores, whose P and Q are the same everywhere.
    """

    def __init__(self, plan: Plan, nodes: Mapping[int, int], seed: int) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.plan, self.nodes, self.seed = plan, nodes, seed
        self.errors: list[float] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        drawn = random.Random(f"{self.seed} {server_round}").sample(range(self.plan.clients), self.plan.clients_a_round)
        config["server-round"] = server_round
        self.before = arrays
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        return self._construct_messages(record, [self.nodes[number] for number in drawn], MessageType.TRAIN)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        number_of = {node: number for number, node in self.nodes.items()}
        replies = sorted(replies, key=lambda reply: number_of[reply.metadata.src_node_id])  # sums depend on their order
        failed = [reply.error.reason for reply in replies if reply.has_error()]
        if failed:
            raise RuntimeError(failed[0])
        average, told = super().aggregate_train(server_round, replies)
        self.errors.append(averaging_error(self.before, average, [reply.content["arrays"] for reply in replies]))
        return average, told


def averaging_error(before: ArrayRecord, average: ArrayRecord, sent: Sequence[ArrayRecord]) -> float:
    """See :class:`Drawn`; all clients have as many rows."""
    error = change = 0.0
    for name in before:
        if "lora_A" in name:
            other = name.replace("lora_A", "lora_B")
            wanted = sum(one[other].numpy() @ one[name].numpy() for one in sent) / len(sent)
            error += float(((average[other].numpy() @ average[name].numpy() - wanted) ** 2).sum())
            change += float(((wanted - before[other].numpy() @ before[name].numpy()) ** 2).sum())
    return (error / change) ** 0.5 if change else 0.0


class Study:
    """The runs and scores, each kept in a file of the folder."""

    def __init__(self, plan: Plan, grid: Grid) -> None:
        self.plan, self.grid, self.folder = plan, grid, Path(plan.folder)
        while len(nodes := list(grid.get_node_ids())) < plan.clients:
            time.sleep(1)
        told = grid.send_and_receive([Message(RecordDict(), node, MessageType.QUERY) for node in nodes])
        self.nodes = {int(one.content["told"]["number"]): one.metadata.src_node_id for one in told}

    def trained(self, run: Run) -> Path:
        """The folder of a run: the averages of its rounds, and ``run.json``."""
        folder = self.folder / "runs" / fingerprint_options(asdict(run))[:12]
        if not (folder / "run.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            model, _ = adapted(self.plan, run.contestant)
            torch.manual_seed(run.seed)
            start = {
                name: torch.zeros_like(X) if "lora_B" in name or "cores" in name else
                torch.nn.init.kaiming_uniform_(torch.empty_like(X), a=5**0.5)
                for name, X in get_peft_model_state_dict(model).items()
            }  # fmt: skip
            strategy = Drawn(self.plan, self.nodes, run.seed)

            def keep(number: int, arrays: ArrayRecord) -> None:
                torch.save(dict(arrays.to_torch_state_dict()), folder / f"{number}.pt")

            result = strategy.start(
                self.grid, ArrayRecord(start), num_rounds=self.plan.rounds, train_config=ConfigRecord(asdict(run)),
                evaluate_fn=keep,
            )  # fmt: skip
            losses = [float(told["loss"]) for told in result.train_metrics_clientapp.values()]
            found = {"losses": losses, "averaging_errors": strategy.errors, "bytes": result.arrays.count_bytes()}
            write_json(folder / "run.json", asdict(run) | found | {"values": sum(X.numel() for X in start.values())})
        return folder

    def score(self, run: Run, number: int, use: str) -> dict[str, list[float]]:
        """After a round, of each row: whether it is answered rightly, and the nats of the right answer."""
        folder = self.trained(run)
        file = folder / f"{use}-{number}.json"
        if not file.is_file():
            model, encoder = adapted(self.plan, run.contestant)
            set_peft_model_state_dict(model, torch.load(folder / f"{number}.pt", weights_only=True))
            rows = rows_of(self.plan)[use]
            said = predict_choices(model, encoder, rows)
            nats = [-each.logprobs[row.choices.index(row.completion)] for each, row in zip(said, rows, strict=True)]
            write_json(file, {"accuracy": [float(each.correct) for each in said], "loss": nats})
        found: dict[str, list[float]] = json.loads(file.read_text())
        return found

    def means(self, run: Run, number: int, use: str) -> dict[str, Any]:
        """Accuracy and loss after a round, and the accuracy by task."""
        score, each = self.score(run, number, use), self.plan.scored_rows
        right = score["accuracy"]
        by_task = {name: mean(right[i * each : (i + 1) * each]) for i, name in enumerate(self.plan.tasks)}
        return {"round": number, **{name: mean(values) for name, values in score.items()}, "by_task": by_task}

    def searched(self, contestant: str, num_rates: int) -> list[dict[str, Any]]:
        """The validation scores of the contestant's first rates, with the first seed; one rate needs none."""
        runs = [Run(contestant, rate, self.plan.seeds[0]) for rate in CONTESTANTS[contestant][1][:num_rates]]
        if num_rates == 1:
            return [asdict(run) | {"chosen": True} for run in runs]
        rows = [asdict(run) | self.means(run, self.plan.rounds, "validation") for run in runs]
        best = min(rows, key=lambda row: row["loss"])
        return [row | {"chosen": row is best} for row in rows]

    def found(self, run: Run, reference: Run) -> dict[str, Any]:
        """A run with its test scores, and their differences from another's: mean and 95 % interval over the rows."""
        counts = range(self.plan.score_every, self.plan.rounds + 1, self.plan.score_every)
        own, other = (self.score(one, self.plan.rounds, "test") for one in (run, reference))
        differences = {}
        for name in own:
            each = [x - y for x, y in zip(own[name], other[name], strict=True)]
            differences[name] = [mean(each), 1.96 * stdev(each) / len(each) ** 0.5]
        digest = fingerprint_options(
            {"rows": [[row.id for row in rows] for rows in rows_of_clients(self.plan, run.seed)]}
        )
        kept = json.loads((self.trained(run) / "run.json").read_text())
        curve = [self.means(run, number, "test") for number in counts]
        return kept | {"rows_of_clients": digest, "curve": curve, "minus_reference": differences}


def server_app(plan: Plan, options: argparse.Namespace) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        study = Study(plan, grid)
        for num_rates, num_seeds in STAGES:
            search = [row for contestant in CONTESTANTS for row in study.searched(contestant, num_rates)]
            chosen = {row["contestant"]: row["rate"] for row in search if row["chosen"]}
            runs = [[Run(name, chosen[name], seed) for name in CONTESTANTS] for seed in plan.seeds[:num_seeds]]
            rows = [study.found(run, of_seed[0]) for of_seed in runs for run in of_seed]
            about = {name: value for name, value in asdict(plan).items() if name not in ("folder", "data_root")}
            write_found(options, plan=about, base=study.means(runs[0][0], 0, "test"), rows=rows, search=search)

    return app


def main() -> None:
    parser = parser_of(__doc__, "federated")
    parser.add_argument("--data-root", type=Path, help="Folder of the tasks' data sets.")
    parser.add_argument("--folder", type=Path, required=True, help="Bases, runs and scores; what is there is kept.")
    parser.add_argument("--score-every", type=int, help=f"Rounds; default: {Plan.score_every}.")
    parser.add_argument("--at-once", type=int, default=1, help="Clients that train at a time.")
    options = parser.parse_args()
    plan = replace(QUICK if options.quick else Plan(), folder=str(options.folder.resolve()))
    if options.data_root is not None:
        plan = replace(plan, data_root=str(options.data_root.resolve()))
    if options.score_every:
        plan = replace(plan, score_every=options.score_every)
    torch.set_num_threads(1)
    for contestant in CONTESTANTS:
        adapted(plan, contestant)  # the bases, before the clients ask for them
    run_simulation(
        server_app(plan, options), client_app(plan), num_supernodes=plan.clients,
        backend_config={
            "init_args": {"num_cpus": options.at_once, "object_store_memory": 2**28},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )  # fmt: skip


if __name__ == "__main__":
    import federated_smollm2  # by its name, as the process of the clients imports it

    federated_smollm2.main()
