"""One run of many tenants: each has its own rows, adapter and record; basis and training are shared."""
