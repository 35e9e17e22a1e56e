"""Runs untrusted Python programs against their tests, isolated as far as the machine allows, and serves that over HTTP.

From the outside in: `server` is the command, `connection` bounds a client, `app` is the HTTP contract, `code_requests`
unpacks requests, `sandbox` is the pool of slots, `slot` one of them, and `isolation` measures the isolation of programs
on this machine. Walls are the namespaces around a slot, and `walled` its owner's side. Inside them: `zygote` is a slot's
process and `walls` sets them up, `supervisor` runs one program, and `untrusted_program` is the last of our code before the
program's own.

`interpreters` has kernels, which keep their names from call to call, for `sessions` of the service and for the tool python:
inside the walls, `session` is the supervisor of one, and `interpreter` the last of our code. `supervision` is common to both
kinds of supervisors.

A program has no access to the expected results. `cases` reads tests, and `outputs` compares printed text. An assert
test is taken apart by `split` and `questions`, and decided by `judge`, from values that `plain_data` carries; `plain_functions`
are the functions that a test may use besides the program.
"""
