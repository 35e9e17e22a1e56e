"""A training step of any learner rank, run for real on tensors that believe they are on CUDA, without a GPU.

`cuda` is the device that is not there, `kernel_shapes` what only a device could compute, `recorder` what is measured,
`rehearsed_step` the step itself, and `__main__` the process in which it runs: `mgrpo plan --rehearse` starts one for each rank and puts the results
beside the plan (`planner.roles`, `planner.comparison`).
"""
