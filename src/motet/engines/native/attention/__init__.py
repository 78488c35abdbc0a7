"""Group attention: which row reads which keys in a step (`plan`), and how torch's operators do it (`group`)."""
