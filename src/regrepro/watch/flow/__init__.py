"""The machine code of a function, followed along every path that it can take.

From the ground up: `state`, `machine`, then `x86_64` and `aarch64`, and `graph`.
"""
