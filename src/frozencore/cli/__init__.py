"""The command line: verbs, flags, help, progress, tables and figures."""
