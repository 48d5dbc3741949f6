"""Files: atomic writing, strict YAML, models on disk or on the hub, and fingerprints."""
