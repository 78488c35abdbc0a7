"""Any OpenAI-compatible server as a place where texts become texts: what is n there is n choices here.

base      the seam: what is asked, what comes back, who answers
client    one server: connections, keys, time-outs, and what its failures mean
probe     what it can: whether n answers come for n asked, and in which words it takes a limit
upstream  such a server as one of several: what keepers and routing see of it
fan_out   a group: one request where n is honoured, else one a choice, joined to one stream
answer    one request and what comes back
merge     pure: chunks of one request -> pieces of the group's choices
"""
