"""One step of the engine, and the groups and sequences on which it works.

1. `scheduling` decides which sequences get blocks and tokens of the budget. The result is a `step_plan`. `handover`
   manages transfers of trunks between workers, and `drafts` with `ngrams` makes draft tokens.
2. `inputs` converts the plan to the rows of one flat batch: tokens, positions, slots, and the keys that each row reads.
3. `run` is the forward pass: inputs in, logits out.
4. `commit` samples the next token of every choice that has a row of logits, and applies the results: it counts computed
   tokens, appends new tokens, ends choices, frees blocks and makes the deltas.

`sequence` defines the groups and sequences.
"""
