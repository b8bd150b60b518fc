"""Configuration: a schema of plain frozen dataclasses, and how files and overrides become one."""
