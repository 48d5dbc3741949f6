"""The time that refreshing adds to a training: two trainings side by side on one batch, one plain, one in rounds.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/refreshing.py
    python benchmarks/refreshing.py --quick

The two take turns step by step, and processor seconds are counted. Each step of the training in rounds is divided by
the plain step beside it. The table has the medians of these ratios, separately for steps with and without summing;
earlier rounds are included. ``extra`` is the extra time of a training on 1,600 rows, 8 a step, in the number of rounds
that ``auto`` chooses. It weighs the two ratios by the share of summed steps and adds the refreshes.

``tiny`` has four layers 128 wide, batches of 8 rows of 100 tokens; ``wide`` one layer 2,048 wide with the
shapes of Qwen2.5-3B (a small vocabulary, so that a plain step is cheap), one row of 64. Weights and tokens are random.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from statistics import median
from types import SimpleNamespace
from typing import Any

from peft import get_peft_model
from torch import nn

from contestants import ATTENTION, Stepper, adapter_config, labelled_batch, random_ids, random_qwen2
from frozencore import Refresh, calibrate
from frozencore.adapter.bases.refresh_plan import rounds_for
from harness import cpu_s, parser_of, table, write_found

TRAINED, A_STEP = 1600, 8  # rows


@dataclass(frozen=True)
class Setting:
    """A model by name, what is adapted, the batch (rows x tokens), and the training."""

    model: str
    targets: str
    num_rows: int
    num_tokens: int
    rank: int
    num_rounds: int
    steps_a_round: int
    memory_budget: str | None = None


SETTINGS = [
    Setting("tiny", "attention", 8, 100, 16, 5, 12),
    Setting("tiny", "all-linear", 8, 100, 12, 5, 12),
    Setting("wide", "attention", 1, 64, 16, 3, 3),
    Setting("wide", "attention", 1, 64, 16, 3, 3, "8.9MB"),  # as wide as 36 layers are sketched in 128 MB
    Setting("wide", "all-linear", 1, 64, 16, 3, 3),
]
QUICK = [
    Setting("quick", "attention", 2, 16, 4, 3, 4),
    Setting("quick", "all-linear", 2, 16, 4, 3, 4, "150KB"),
]


def model_of(name: str) -> nn.Module:
    if name == "tiny":
        return random_qwen2(4, 128, heads=2, inner=352, vocabulary=512)
    width, inner, heads = (2048, 11008, 16) if name == "wide" else (64, 160, 4)
    return random_qwen2(1, width, heads=heads, inner=inner, vocabulary=512)


class Training:
    """A model with a core, its optimiser, and callbacks in the order in which a Trainer calls them."""

    def __init__(self, setting: Setting, rounds: int) -> None:
        targets = ATTENTION if setting.targets == "attention" else "all-linear"
        self.model = get_peft_model(model_of(setting.model), adapter_config("frozencore", targets, setting.rank))
        self.batch = labelled_batch(random_ids(setting.num_rows, setting.num_tokens, 512))
        self.batch["labels"] = self.batch["input_ids"]
        calibrate(self.model, [self.batch], progress=False)
        self.stepper = Stepper(self.model.train())
        self.refresh = Refresh(self.model, rounds, memory_budget=setting.memory_budget)
        self.state: Any = SimpleNamespace(global_step=0, max_steps=setting.num_rounds * setting.steps_a_round)
        self.told: Any = (SimpleNamespace(), self.state, SimpleNamespace())
        self.refresh.on_train_begin(*self.told)

    def begin_step(self) -> None:
        self.refresh.on_step_begin(*self.told, optimizer=self.stepper.optimizer)

    def step(self) -> None:
        self.stepper.step(self.batch)
        self.state.global_step += 1


def measure(setting: Setting) -> dict[str, Any]:
    """One setting; ``summed`` and ``others`` are ratios of the two kinds of steps, None where there are none of a kind.

    ``share`` is that of the summed steps, ``columns`` the width of the sketches, 0 for exact sums.
    """
    plain, rounds = Training(setting, 1), Training(setting, setting.num_rounds)
    ratios: dict[bool, list[float]] = defaultdict(list)
    plain_s: list[float] = []
    refresh_s: list[float] = []
    for number in range(plain.state.max_steps):
        begun = cpu_s(rounds.begin_step)
        if number and number % setting.steps_a_round == 0:
            refresh_s.append(begun)
        is_last = number >= plain.state.max_steps - setting.steps_a_round
        summed = not is_last and rounds.refresh.sums_now
        pair = {training: cpu_s(training.step) for training in ((plain, rounds) if number % 2 else (rounds, plain))}
        if number >= 2:  # the first ones are slower
            ratios[summed].append(pair[rounds] / pair[plain])
            plain_s.append(pair[plain])
    plain.refresh.close()
    rounds.refresh.close()
    share = rounds.refresh.share
    a_step, found = median(plain_s), {kind: median(values) for kind, values in ratios.items()}
    steps = share * found.get(True, 1.0) + (1 - share) * found.get(False, 1.0) - 1
    chosen = rounds_for(TRAINED, TRAINED // A_STEP, share)
    refreshing = (chosen - 1) * median(refresh_s) / (TRAINED / setting.num_rows * a_step)
    widths = rounds.refresh.widths
    return {
        "plain_s": a_step,
        "share": share,
        "summed": found.get(True),
        "others": found.get(False),
        "refresh_s": median(refresh_s),
        "rounds": chosen,
        "extra": steps * (chosen - 1) / chosen + refreshing,
        "columns": max(widths.values()) if widths else 0,
    }


def main() -> None:
    parser = parser_of(__doc__, "refreshing")
    parser.add_argument("--model", choices=["tiny", "wide"], help="Only settings of this model.")
    options = parser.parse_args()
    settings = [one for one in (QUICK if options.quick else SETTINGS) if options.model in (None, one.model)]
    rows = [asdict(setting) | measure(setting) for setting in settings]
    headings = ["", "sums", "plain step", "summed", "step summed", "not summed", "refresh", "rounds", "extra"]
    print(table(headings, [
        [f"{row['model']}, {row['targets']}, r = {row['rank']}",
         f"{row['columns']} columns" if row["columns"] else "exact", f"{1e3 * row['plain_s']:.0f} ms",
         f"{row['share']:.0%} of steps",
         *("" if row[kind] is None else f"{row[kind]:.3f}" for kind in ("summed", "others")),
         f"{row['refresh_s']:.2f} s", str(row["rounds"]), f"{row['extra']:+.1%}"]
        for row in rows
    ]))  # fmt: skip
    write_found(options, rows_trained=TRAINED, rows=rows)


if __name__ == "__main__":
    main()
