"""The bench: what this repository claims to be fast at, each claim measured against a named baseline in the same run.

`core` says what a row is, `turns` how two sides are compared, `processes` how a side runs in a process of its own,
`results` how figures are kept, `rows` holds one file per claim. `tools/nox -s bench -- --list` lists them.
"""
