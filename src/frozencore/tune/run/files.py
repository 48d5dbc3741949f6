"""The files of a run's folder, of an evaluation's, and of a calibration's."""

from __future__ import annotations

from frozencore.files.adapter_folder import IN_A_RUN

RECORD, FAILURE = "result.json", "failure.json"
ASKED = "run.yaml"  # what `tune` was asked for, as its --config takes it
PREDICTIONS, SAMPLES = "predictions.jsonl", "samples.jsonl"
ADAPTER, BASIS = IN_A_RUN, "basis"
MOMENTS_FILE = "moments.safetensors"
CHECKPOINTS, FOUND = "checkpoints", ".found"  # of a run that has not ended
BASE_SCORE, CALIBRATION = "base-score.json", "calibration.json"  # what it has found
ADVICE = "advice.json"
