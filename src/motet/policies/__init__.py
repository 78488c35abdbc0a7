"""Policies of groups: while the choices of a group run, a policy decides which of them end early, and which start.

    criteria    conditions on the values of finished choices, which end a group
    extract     the value of an answer: what is compared
    confidence  choices that the model is not sure of
    steering    the decisions of one group
    driver      passes the steps of a group to its policy, and ends by the client
    lockstep    steps that depend on numbers of tokens alone

A decision is a function of the output tokens and of nothing else: no clock, no load, no worker. So a request ends in
the same way wherever it runs. Except for the driver's turns of the event loop, all of this is pure.
"""
