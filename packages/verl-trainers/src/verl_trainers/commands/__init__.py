"""The commands of `verl-train`, a module each: `add_parser` says what it takes, `run` does it."""
