"""A checkpoint's files: contents, completeness, and download from the Hub."""
