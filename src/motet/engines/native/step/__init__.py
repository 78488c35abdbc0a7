"""One step of the engine, in the order in which its parts run. `core.EngineCore.step` calls them one after the other.

1. `scheduler` decides who gets blocks and tokens of the budget; it writes that down as a `plan`.
2. `inputs` lays the plan out as the rows of one flat batch: tokens, positions, slots, and which row reads which keys.
3. `run` is the forward pass: inputs in, logits out.
4. `commit` asks the sampler for the next token of every choice that has a row of logits, and books what was computed
   and drawn: it appends tokens, ends choices, frees blocks and makes the deltas.

`sequence` holds what all of them work on: groups and their sequences.
"""
