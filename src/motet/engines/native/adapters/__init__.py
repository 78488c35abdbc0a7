"""LoRA adapters (Hu et al., 2021): low-rank changes of linear layers, for the rows of some groups of a step.

    y = x W^T + (x A^T) B^T                A [rank, inputs], B [outputs, rank], multiplied by the scaling

low_rank           the types that the other modules exchange
peft_config        the configuration of a PEFT folder
peft_files         reads a PEFT folder or a file in memory, and checks it
adapter_loader     executes orders to load adapters, in a thread
loaded_adapters    the adapters of an engine, by name
adapter_changes    adds, replaces and removes adapters between two steps
linear_adapters    computes adapters with torch's operators; `cpu.packed_adapters` with the compiled kernels

Life cycle of an adapter:

    1. LoadAdapter ─► a thread reads and checks the files, and converts the tensors for the backend
    2. Between two steps, the adapter is added, or replaces the adapter of the same name. Groups of a replaced adapter
       lose their KV and continue with the new one.
    3. A group keeps its adapter until it ends, also after UnloadAdapter. The memory is freed with the last group.
"""
