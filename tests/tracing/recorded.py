"""A tracer that keeps the spans of a server in the test's own process."""

from motet.tracing.spans import ALL_TRACES, ChildSpan, RecordingTracer, SpanRecord
from motet.tracing.variables import Sampling


class RecordedTracer(RecordingTracer):
    def __init__(self, sampling: Sampling = ALL_TRACES) -> None:
        self.records: list[SpanRecord] = []
        super().__init__(self.records.append, sampling=sampling)

    def named(self, name: str) -> list[SpanRecord]:
        return [one for one in self.records if one.name == name]

    def one(self, name: str) -> SpanRecord:
        (record,) = self.named(name)
        return record

    def children(self, parent: SpanRecord) -> list[str]:
        """Returns the names of a span's children, by start time."""
        separate = [one for one in self.records if one.parent_id == parent.span_id]
        both: list[SpanRecord | ChildSpan] = [*separate, *parent.children]
        return [one.name for one in sorted(both, key=lambda one: one.start_ns)]
