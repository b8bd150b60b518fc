"""From a configuration of upstream's verl to a recipe of ours, with the fate of every key.

`inputs` reads, `tables` say what becomes of each key, `translate` applies them, `render` writes the recipe and the
report. Nothing is dropped silently: the fates add up to the keys of the input.
"""
