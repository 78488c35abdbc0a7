"""Policies of a group: while its choices are written, they say which of them are worth going on with.

What a policy decides is a function of what was written, and of nothing else: no clock, no load, no worker. So the same
request ends in the same way wherever it runs, and everything here is pure: texts and numbers in, decisions out.
"""
