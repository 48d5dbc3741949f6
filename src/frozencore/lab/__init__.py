"""The lab: tasks, scoring, training recipe, pocket model, reports. The library never imports it."""
