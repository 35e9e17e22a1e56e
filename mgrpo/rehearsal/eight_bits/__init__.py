"""Transformer Engine without its kernels: the parts that Megatron and mgrpo call, in torch's operations.

On the CPU it computes with the values that the recipes round to, so that their error can be measured. On the GPUs of a
rehearsal it allocates and sends the same as the kernels. It is not a replacement: it is never faster.
"""
