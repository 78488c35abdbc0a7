"""How long tests wait for what comes in a moment: machines stand still for seconds, and a limit is for what hangs."""

PATIENCE_S = 100.0
