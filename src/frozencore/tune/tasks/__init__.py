"""The paper's tasks, one file each; ``frozencore.tune.rows.suite`` adds the pocket tasks and finds them by name."""

from __future__ import annotations

from frozencore.tune.tasks import (
    arc_challenge,
    cola,
    gsm8k,
    hellaswag,
    mrpc,
    openbookqa,
    qnli,
    rte,
    sst2,
    svamp,
    winogrande,
)
from frozencore.tune.tasks.task import Example, Task

PAPER_TASKS: dict[str, Task] = {
    module.TASK.name: module.TASK
    for module in (
        svamp, gsm8k, sst2, qnli, cola, rte, mrpc, arc_challenge, openbookqa, hellaswag, winogrande,
    )
}  # fmt: skip

__all__ = ["PAPER_TASKS", "Example", "Task"]
