"""Runs untrusted Python programs against their tests, isolated as far as the machine allows, and serves that over HTTP.

The parts, from the outside in: `server` is the command, `app` the HTTP contract, `sandbox` the slots that programs wait for,
`slot` one of them, `isolation` what the walls are worth on this machine. On the other side of the walls: `zygote` is the
process of a slot and `walls` what it raises, `supervisor` watches one program, and `program` is the last of our code before
the program's own. `cases` reads tests and `outputs` compares what was printed; both stay outside, so that a program never
meets the output that it should print.
"""
