"""From a model and calibration batches to the moments of its layers: capture, collection, storage."""
