"""The parts of a mixture of experts: its router and its experts."""
