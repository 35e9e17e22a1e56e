"""HF <-> Megatron: one immutable rule table per family; import, export, weight sync and checkpoints all read it."""
