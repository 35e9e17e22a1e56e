"""The parts of an MoE layer: its router and its experts."""
