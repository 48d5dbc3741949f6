"""One run of many tenants: a row file each, one basis, one training, an adapter and a record each."""
