"""The operating system: its processor and memory, limits of processes, and threads that cannot be interrupted."""
