"""Files: written whole or not at all, YAML read strictly, models found on disk or hub, and their fingerprints."""
