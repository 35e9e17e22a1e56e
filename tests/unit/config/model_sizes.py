"""What a config.json says of a small model, for rules that read it."""

HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3}
SIZES = HEADS | {"hidden_size": 576, "intermediate_size": 1536, "vocab_size": 49152, "num_hidden_layers": 30}
