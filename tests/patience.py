"""Time limit of tests for events that usually take a moment. A machine can stall for seconds; only a hang takes longer
than this."""

PATIENCE_S = 100.0
