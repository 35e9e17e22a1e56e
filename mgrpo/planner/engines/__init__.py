"""Inference engines: memory, lengths of answers, time of decoding, of messages and weight syncs, the pace of asynchronous steps, and published ones."""
