"""LoRA adapters (Hu et al., 2021): low-rank changes of linear layers, for the rows of some groups of a step.

    y = x W^T + (x A^T) B^T                A [rank, inputs], B [outputs, rank], which contains the scaling

low_rank           the types that the other modules exchange
peft_config        the configuration of a PEFT folder
peft_files         reads a PEFT folder or a file in memory, and checks it
adapter_loader     carries out orders to load adapters, in a thread
loaded_adapters    the adapters of an engine, and the groups that use them
linear_adapters    computes adapters with torch's operators; `cpu.packed_adapters` with the compiled kernels

Life of an adapter:

    1. LoadAdapter ─► a thread reads and checks the files, and makes the form that the backend computes with
    2. Between two steps, the adapter is added, or replaces the adapter of the same name. Groups of a replaced adapter
       lose their KV and continue with the new one.
    3. A group keeps its adapter until its end, also after UnloadAdapter. The memory is freed with the last group.
"""
