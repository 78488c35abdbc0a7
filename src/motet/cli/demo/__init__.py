"""`motet demo`: its command, the kill of an engine in mid-stream, and the receipt."""
