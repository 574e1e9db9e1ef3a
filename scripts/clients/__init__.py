"""Programs of others that run our nets: each script tries one."""
