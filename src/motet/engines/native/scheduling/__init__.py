"""Decides which groups and sequences get blocks, rows and tokens in each step of an engine.

scheduler          makes the plan of a step, in order
plan_builder       collects the chunks of the plan, within its limits
clients            what each client uses, and the share to which it is entitled
work_order         which replay, prompt or waiting group comes next
step_cost          the cost of work, and the limit on the duration of a step
queues             waiting groups
group_admission    decides which waiting groups start
running_groups     groups with blocks, and preemption
sharing            trunks and blocks that several groups use
keeping            trunks that are kept after the end of their groups
"""
