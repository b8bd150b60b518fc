"""Agent loops, the workers that play them, and the manager that owns the workers."""
