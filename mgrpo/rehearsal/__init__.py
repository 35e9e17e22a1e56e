"""A training step of any learner rank, run for real on tensors that report CUDA as their device, without a GPU.

`cuda` is the simulated device, `kernel_shapes` the operations that need a real one, `recorder` the measurements,
`rehearsed_step` the step itself, and `__main__` the process in which it runs: `mgrpo plan --rehearse` starts one for each rank and puts the results
beside the plan (`planner.roles`, `planner.comparison`).
"""
