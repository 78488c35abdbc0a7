"""Any OpenAI-compatible server as a source of texts, with groups of n choices.

base      the seam: requests, answers, and the servers that give them
bodies    pure: the bodies that are sent, and from the bodies and chunks that come back to pieces of the group's choices
server    its connections, keys and time-outs, the errors for its failures, its report and its abilities
upstream  a server as its keeper and routing see it, and its groups
"""
