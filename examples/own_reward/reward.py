"""A custom reward for the quickstart's sums: the closer the number, the higher the reward."""


def closeness(completions: list[str], ground_truth: list[str], **kwargs: object) -> list[float]:
    """1 for the right sum, 1/2 for one that is off by one, 1/3 for two, ...; 0 if it is not a number."""
    return [
        1 / (1 + abs(int(text) - int(answer))) if text.isdecimal() and len(text) < 10 else 0.0
        for text, answer in zip(completions, ground_truth, strict=True)
    ]
