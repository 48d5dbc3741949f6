"""From a calibration pass to P and Q on the layers of a model."""
