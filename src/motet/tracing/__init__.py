"""Traces of requests, as OpenTelemetry has them; docs/traces.md shows the tree of spans.

context.py    where in a trace a piece of work stands, in W3C's words: `traceparent` and `tracestate`
spans.py      spans as this process makes them: plain records, and nothing at all while there are no traces
variables.py  OpenTelemetry's own variables, as far as the server itself must know them
sender.py     the process that sends them, as this process sees it
export.py     that process: the only place that imports OpenTelemetry
"""
