"""Rehearse a whole campaign on tiny models, from specification to report, before the real one."""
