"""Everything that talks to a person: verbs, flags, help, progress, tables and figures."""
