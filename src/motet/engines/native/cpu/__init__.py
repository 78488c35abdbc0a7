"""The forward pass in C++ (`csrc/`), for processors with bf16 dot products; torch's operators serve all others."""
