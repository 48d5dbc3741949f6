"""A campaign from its specification to its report on stand-ins, before it costs anything."""
