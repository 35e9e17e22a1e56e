"""HF <-> Megatron: one immutable rule table a family; import, export, weight sync and checkpoints all read it."""
