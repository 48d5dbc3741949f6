"""Federated averaging on SmolLM2 by Flower, with clients whose rows differ: cores against LoRAs.

    make federated
    nice -n 5 .engines/flower/bin/python benchmarks/federated_smollm2.py --data-root DATA --folder runs/federated
    .engines/flower/bin/python benchmarks/federated_smollm2.py --quick --folder runs/quick

It goes on where it stopped. Five clients train in a round, once over their rows, and FedAvg averages what they send.
All contestants have the same clients, rows and steps; the learning rate of each has the lowest loss on validation rows,
with the first seed. Rates are a factor of two apart, and the search goes on until the best has others on both sides.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from peft import get_peft_model_state_dict, set_peft_model_state_dict

from federated_clients import CONTESTANTS, QUICK, Plan, adapted, client_app, rows_of, rows_of_clients
from frozencore.files.fingerprint import fingerprint_options
from frozencore.files.whole_file import write_json
from frozencore.tune.scoring.choice import predict_choices
from harness import parser_of, write_found

MOST_RATES = 8


@dataclass(frozen=True)
class Run:
    """One federated training."""

    contestant: str
    rate: float
    seed: int


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

    def searched(self, contestant: str) -> list[dict[str, Any]]:
        """The validation scores of each rate, with the first seed, until the best has others on both sides."""
        tried: dict[float, dict[str, Any]] = {}
        rates = [CONTESTANTS[contestant][1] * factor for factor in (1, 2, 0.5)]
        while rates and len(tried) < MOST_RATES:
            for rate in rates:
                run = Run(contestant, rate, self.plan.seeds[0])
                tried[rate] = asdict(run) | self.means(run, self.plan.rounds, "validation")
            best = min(tried, key=lambda rate: tried[rate]["loss"])
            rates = [rate for rate in (best * 2, best / 2) if rate not in tried]
        return [tried[rate] | {"chosen": rate == best} for rate in sorted(tried)]

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
        search = [row for contestant in CONTESTANTS for row in study.searched(contestant)]
        chosen = {row["contestant"]: row["rate"] for row in search if row["chosen"]}
        for num_seeds in range(1, len(plan.seeds) + 1):  # the results are written after each seed
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
    main()
