"""What docs/many-cores.md says of the cost of a tenant, and docs/figures/tenants.png, from what benchmarks/tenants.py
and benchmarks/many_training.py wrote.

    python benchmarks/tenants_page.py            # rewrites both;  --check says whether the page is that of the file
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import NullFormatter

from cost_page import rewritten
from growth_figure import BLUE, GREY, ORANGE
from machine import machine_name
from speed_tables import table

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
PAGE, FIGURE = ROOT / "docs" / "many-cores.md", ROOT / "docs" / "figures" / "tenants.png"
CORE, WHOLE, LORA = "core", "core with its basis", "LoRA r=16"


def render(found: dict[str, Any]) -> dict[str, str]:
    """The generated blocks of the page by name."""
    kept = found["keep"]
    disk, adapters = kept["disk_bytes"], kept["adapters"]
    a_tenant = table(
        ["a tenant is", "bytes on disk", "memory, loaded by PEFT", "to load"],
        [
            [name, f"{disk[name]:,}", f"{adapters[name]['resident_bytes_each'] / 1e6:.2f} MB",
             f"{1e3 * adapters[name]['load_s']:.0f} ms"]
            for name in (CORE, WHOLE, LORA)
        ],
    )  # fmt: skip
    bank = table(
        ["tenants in a bank", "memory beside the base and the basis", "for one to enter", "95 % within"],
        [
            [f"{row['tenants']:,}", f"{row['resident_bytes'] / 1e6:.1f} MB", f"{1e3 * row['enter_s']:.2f} ms",
             f"{1e3 * row['enter_s_p95']:.2f} ms"]
            for row in kept["bank"]
        ],
    )  # fmt: skip
    contestants = list(found["batch"][0]["forward"])
    batch = table(
        ["model", "what", *contestants[1:]],
        [
            [of_model["model"], words, *(_ratio(of_model[what][name]["over_base"]) for name in contestants[1:])]
            for of_model in found["batch"]
            for what, words in (("forward", "forward"), ("generate", "32 tokens"))
        ],
    )
    return {"tenants-keep": f"{a_tenant}\n{bank}", "tenants-batch": batch}


def _ratio(quartiles: list[float]) -> str:
    middle, low, high = quartiles
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def tenants_figure(found: dict[str, Any], many: dict[str, Any] | None, path: Path) -> None:
    """Bytes a tenant on disk and in memory, and processor time of its training step, against the number of tenants."""
    kept = found["keep"]
    disk, counts = kept["disk_bytes"], [row["tenants"] for row in kept["bank"]]
    figure, axes = plt.subplots(1, 2 if many is None else 3, figsize=(7.2 if many is None else 10.5, 3.3))
    ours, lora = {"color": ORANGE, "marker": "o", "ms": 4}, {"color": BLUE, "marker": "s", "ms": 3}
    axes[0].plot(
        counts, [disk[CORE] + disk["basis"] / n for n in counts], label="core, and its share of the basis", **ours
    )
    axes[0].plot(counts, [disk[LORA]] * len(counts), label="LoRA r=16", **lora)
    axes[0].set_title("bytes a tenant on disk", fontsize=10)
    basis = disk["basis"]
    in_bank = [(row["resident_bytes"] + basis) / row["tenants"] for row in kept["bank"]]
    axes[1].plot(counts, in_bank, label="core in a bank, and the basis", **ours)
    axes[1].plot(counts, [kept["adapters"][LORA]["resident_bytes_each"]] * len(counts), label="LoRA r=16", **lora)
    axes[1].set_title("bytes a tenant in memory", fontsize=10)
    if many is not None:
        grown = many["growth"]
        own = [row["tenants"] for row in grown]
        axes[2].plot(own, [1e3 * row["tenant_step_s"] for row in grown], label="core, trained in company", **ours)
        alone = next(row for row in many["rows"] if row["model"] == "pocket" and row["rows_a_step"] == 1)
        for name, label, style in (
            ("LoRA one after the other", "LoRA one after the other", lora),
            ("floor", "floor of 32 at once", {"color": GREY, "ls": "--"}),
        ):
            axes[2].plot(own, [1e3 * alone["tenant_step_s"][name]] * len(own), label=label, **style)
        axes[2].set_title("ms a tenant's training step (pocket)", fontsize=10)
        axes[2].set_yticks([5, 10, 20], ["5", "10", "20"])
    for axis in axes:
        axis.set_xscale("log")
        ticks = axis.get_yticks(), [label.get_text() for label in axis.get_yticklabels()]
        axis.set_yscale("log")
        if axis is axes[-1] and many is not None:
            axis.set_yticks(*ticks)
            axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_xlabel("tenants", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=8, frameon=False, loc="upper right", bbox_to_anchor=(1, 0.92))
    figure.tight_layout()
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS / f"tenants-{machine_name()}.json")
    parser.add_argument("--many", type=Path, default=RESULTS / f"many-training-{machine_name()}.json")
    parser.add_argument("--check", action="store_true", help="Write nothing; the status is 1 where the page differs.")
    options = parser.parse_args()
    found = json.loads(options.results.read_text())
    page = PAGE.read_text(encoding="utf-8")
    wanted = rewritten(page, render(found))
    if options.check:
        print("The page is that of the results." if page == wanted else "The page is other than the results.")
        return int(page != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
    many = json.loads(options.many.read_text()) if options.many.exists() else None
    tenants_figure(found, many, FIGURE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
