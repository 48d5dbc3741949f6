"""Tasks as sources of rows: the paper's eleven, plain texts of three of them, the pocket model's, and YAML files."""
