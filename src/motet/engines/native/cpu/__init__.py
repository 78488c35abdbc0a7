"""The forward pass in C++ (`csrc/`), for x86 processors with AVX-512 or AVX2; torch's operators serve all others."""
