"""The verifiers, one file per theme; `mgrpo.rewards.registry` finds them by name."""
