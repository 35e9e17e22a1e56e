"""Engines that are vLLM servers, started by others and reached over HTTP."""
