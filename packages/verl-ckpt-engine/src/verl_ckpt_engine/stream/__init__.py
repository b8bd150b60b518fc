"""A verified stream of buckets down trees of ranks, for backends that move bytes between processes and hosts.

`routes` says who gets the weights from whom. `sender` and `receiver` are the two roles, `role` what they share, `node`
one rank with its neighbours, `edges` and `lines` what connects them. A backend brings a `medium` and nothing else.
"""
