"""frozencore-lab: campaigns of many runs, their statistics and reports, rehearsals, and the pocket model's making."""
