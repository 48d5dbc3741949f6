"""Frozen cores as a PEFT method: config, layer, tuner, and the calibration that fixes their bases."""
