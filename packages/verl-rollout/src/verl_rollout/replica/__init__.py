"""A replica: an engine and a weight receiver in a process of their own, and their proxy."""
