"""Everything that talks to a person: the verbs of the command line, boards, lines and tables."""
