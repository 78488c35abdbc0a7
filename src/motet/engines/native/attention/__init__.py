"""Group attention: the keys that each row of a step reads (`attention_plan`), how trunks share their reads (`trees`),
and the computation with torch's operators (`group_attention`)."""
