"""Traces of requests, as defined by OpenTelemetry. docs/traces.md shows the tree of spans.

context.py    the place of a piece of work in a trace, as in W3C Trace Context: `traceparent` and `tracestate`
spans.py      spans in this process: plain records, and no objects while there are no traces
variables.py  OpenTelemetry's own variables that the server itself uses
sender.py     the API process's side of the process that sends the spans
export.py     that process; the only module that imports OpenTelemetry
"""
