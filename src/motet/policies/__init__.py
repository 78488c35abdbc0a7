"""Policies of groups: while the choices of a group run, a policy decides which of them end early, and which start.

    criteria    conditions on the values of finished choices, which end a group
    extract     the value of an answer, which is compared with other values
    confidence  choices that end because the model's confidence is too low
    steering    the decisions of one group
    driver      passes the steps of a group, and the choices that the client ends, to the policy
    lockstep    steps that depend on numbers of tokens alone

A decision is a function of the output tokens and of nothing else: no clock, no load, no worker. So a request ends in
the same way wherever it runs. Except that the driver waits for iterations of the event loop, all of this is pure.
"""
