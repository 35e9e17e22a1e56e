"""The verifiers, one file a theme; `mgrpo.rewards.catalog` finds them by name."""
