"""Engines that are vLLM servers which others have started, over HTTP."""
