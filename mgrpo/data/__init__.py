"""From data sets to prompts: `mixing` reads and checks rows, `prompts` turns them into tokens, `sampler` orders them."""
