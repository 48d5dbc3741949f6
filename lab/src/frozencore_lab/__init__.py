"""frozencore-lab: campaigns of many runs, statistics, reports, rehearsals, and the training of the pocket model."""
