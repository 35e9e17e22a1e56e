"""Environments of other libraries, each behind the protocol of ours."""
