"""Inference engines: memory, lengths of answers, time of decoding, of messages and weight syncs, and the pace of asynchronous steps."""
