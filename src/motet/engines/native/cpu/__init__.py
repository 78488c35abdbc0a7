"""The forward pass in C++ (`csrc/`), for x86 processors with AVX-512 or AVX2. Other processors use torch's
operators."""
