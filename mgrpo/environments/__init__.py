"""Rollouts of several turns: environments and tools, the loop that drives them, and the processes that they run in.

Imports point down these floors, and never along one:

    workers                    the processes, and the pool of environments in them
    loop    adaptors    tools  turns and the tokens between them; environments of other libraries; those of this package
    formats    offered         texts of calls; what a run offers to its model
    environment                the protocol
"""
