"""LoRAs that others published: what one basis keeps of them at 32 and at 4 bits, and what cutting each alone keeps.

    python benchmarks/strangers.py FOLDER      # a folder for each base model, in it one for each adapter

The adapters themselves are not committed. A line of the results is a base model and a rank, with the names of the
adapters (a repository on GitHub, or a part of it) and the share of its update that each keeps.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from peft import LoraConfig, get_peft_model

from frozencore.adapter.compress import compress_adapters
from frozencore.tune.load import load_model
from harness import parser_of, table, write_found

RANKS, BITS = (8, 16, 32), 4


def compressed(adapters: dict[str, Path], rank: int) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        done = compress_adapters(
            adapters, Path(folder) / "shop", rank=rank, bits=BITS, same_base=True, skip_bad=True
        )  # fmt: skip
    sizes = done.sizes
    return {
        "rank": rank, "adapters": {name: round(kept.share, 4) for name, kept in done.kept.items()},
        "skipped": [*done.skipped], "kept": round(sizes.kept_unrounded, 4), "kept_rounded": round(sizes.kept, 4),
        "kept_alone": round(sizes.kept_alone, 4), "pays_from": sizes.pays_from,
        "before": sizes.before, "after": sizes.after, "modules": sizes.modules,
    }  # fmt: skip


def table_of(found: dict[str, Any]) -> str:
    """The share that one basis keeps, by base model and rank."""
    rows = []
    for line in found["lines"]:
        heads = line["modules"] * len(line["adapters"])
        sizes = [f"{(line[when] - heads) / 1e6:.1f}" for when in ("before", "after")]
        kept = [f"{line[name]:.1%}" for name in ("kept", "kept_rounded", "kept_alone")]
        pays = "never" if line["pays_from"] is None else str(line["pays_from"])
        rows.append([line["base"], str(len(line["adapters"])), str(line["rank"]), *kept, *sizes, pays])
    heads = ["base model", "adapters", "rank", "kept", f"kept, {BITS} bits"]
    sizes = ["MB before", f"MB at {BITS} bits", "pays from"]
    return table([*heads, f"cut alone, float32, to the bytes at {BITS} bits", *sizes], rows)


def quick_adapters(folder: Path) -> None:
    """Two LoRAs that nobody trained."""
    for name in ("anna", "ben"):
        model, _ = load_model("pocket", dtype="float32", device="cpu")
        get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).save_pretrained(
            str(folder / "pocket" / name)
        )


def main() -> None:
    parser = parser_of(__doc__, "strangers")
    parser.add_argument("folder", type=Path, nargs="?")
    options = parser.parse_args()
    lines = []
    with TemporaryDirectory() as made:
        if options.quick:
            quick_adapters(Path(made))
        for base in sorted((Path(made) if options.quick else options.folder).iterdir()):
            adapters = {one.name: one for one in sorted(base.iterdir())}
            for rank in RANKS[: 1 if options.quick else None]:
                lines.append({"base": base.name, **compressed(adapters, rank)})
                print(base.name, rank, f"{fmean([*lines[-1]['adapters'].values()]):.3f}", flush=True)
    write_found(options, lines=lines)


if __name__ == "__main__":
    main()
