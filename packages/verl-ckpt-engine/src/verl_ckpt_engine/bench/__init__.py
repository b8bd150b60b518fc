"""How fast a backend moves weights on this machine: `verl-ckpt-bench`. No trainer and no engine is needed.

`payload` makes the weights, `receiving` is a receiver in a process of its own, `syncing` makes whole transfers to some
of them, and `command` prints a table.
"""
