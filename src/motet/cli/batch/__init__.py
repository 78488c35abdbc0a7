"""`motet batch`: the command, the server that it starts, and its progress on the terminal."""
