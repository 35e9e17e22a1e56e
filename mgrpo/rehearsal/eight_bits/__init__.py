"""Transformer Engine without its kernels: what Megatron and mgrpo call of it, in torch's operations.

On the CPU it computes with the values that the recipes round to, so that their error can be measured. On the GPUs of a
rehearsal it allocates and sends what the kernels do. It is no replacement: it is never faster.
"""
