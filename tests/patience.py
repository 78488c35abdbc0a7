"""How long tests wait for what comes in a moment: machines may stand still for seconds, and the limit is for hangs."""

PATIENCE_S = 100.0
