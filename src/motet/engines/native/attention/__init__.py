"""Group attention: what is read in a step (`plan`), how (`group`), and the operators below (`kernels`)."""
