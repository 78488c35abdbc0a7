"""Any OpenAI-compatible server as a place where texts become texts: what is n there is n choices here.

base      the seam: what is asked, what comes back, who answers
upstream  a server as one of several: what its keeper and routing have of it
client    its connections, keys, time-outs, and what its failures mean; `refusal`, `report`
probe     what it can: whether n answers come for n asked, and in which words it is asked
group     the requests of a group, joined to one stream
answer    one request and what comes back
ask, shapes, merge, usage
          pure: bodies that are sent; events -> choices -> pieces of the group
"""
