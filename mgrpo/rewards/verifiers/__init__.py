"""The verifiers, one file per theme; `mgrpo.rewards.catalog` finds them by name."""
