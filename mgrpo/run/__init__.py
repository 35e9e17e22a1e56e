"""The application: a run from its configuration to its report. The only room that imports all others."""
