"""From the results of studies to sheets."""
