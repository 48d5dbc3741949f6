"""Verbs and flags as other programs call them: one line that names ours."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from frozencore.errors import ConfigError
from frozencore.words import nearest_name

VERBS_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("train", "finetune", "fine-tune", "fit", "sft", "run"), "tune"),
    **dict.fromkeys(("eval", "score", "test", "benchmark"), "evaluate"),
    **dict.fromkeys(("convert", "save"), "export"),
    **dict.fromkeys(("show", "info"), "inspect"),
    **dict.fromkeys(("diagnose", "verify"), "doctor"),
}
FLAGS_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("--r", "--lora-r", "--lora-rank", "--lora-dim"), "--rank"),
    **dict.fromkeys(("--lora-alpha", "--scale"), "--alpha"),
    **dict.fromkeys(("--target-modules", "--lora-target-modules", "--lora-target", "--modules"), "--targets"),
    **dict.fromkeys(("--model-name-or-path", "--model-name", "--base-model", "--base"), "--model"),
    **dict.fromkeys(("--dataset", "--dataset-name", "--train-file", "--train-data", "--data-path"), "--data"),
    **dict.fromkeys(("--num-train-epochs", "--num-epochs"), "--epochs"),
    **dict.fromkeys(("--per-device-train-batch-size", "--micro-batch-size", "--train-batch-size"), "--batch-size"),
    **dict.fromkeys(("--gradient-accumulation-steps", "--grad-accum"), "--accumulation"),
    **dict.fromkeys(("--output-dir", "--save-dir", "-o"), "--output"),
    **dict.fromkeys(("--max-seq-length", "--max-seq-len", "--cutoff-len", "--block-size"), "--max-length"),
    **dict.fromkeys(("--warmup-ratio",), "--warmup"),
    **dict.fromkeys(("--resume-from-checkpoint",), "--resume"),
    **dict.fromkeys(("--constructor", "--peft-type"), "--method"),
    **dict.fromkeys(("--torch-dtype", "--precision"), "--dtype"),
}


def refuse_unknown_verb(words: Sequence[str], verbs: Collection[str]) -> None:
    """Refuse a first word that is no verb, and name the one that is meant.

    Raises:
        ConfigError: There is no such verb.
    """
    word = next((word for word in words if word not in ("--debug",)), "-")
    if word.startswith("-") or word in verbs:
        return
    meant = VERBS_ELSEWHERE.get(word) or nearest_name(word, verbs)
    guess = f"Did you mean {meant!r}? " if meant else ""
    raise ConfigError(f"There is no verb {word!r}. {guess}Known: {', '.join(verbs)}.")


def refuse_other_flags(words: Sequence[str], flags: Collection[str]) -> None:
    """Refuse a flag that other programs have under that name, and name ours.

    Args:
        flags: Those that the verb has.

    Raises:
        ConfigError: One of the words is such a flag.
    """
    for word in words:
        came = word.partition("=")[0]
        spelled = came.replace("_", "-")
        meant = FLAGS_ELSEWHERE.get(spelled, spelled)
        if came not in flags and meant in flags:
            raise ConfigError(f"There is no flag {came}. Give {meant} instead.")
