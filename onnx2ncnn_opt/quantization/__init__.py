"""int8 nets: the scales that data gives, the layers that are worth it, and what it costs in accuracy."""
