"""Short ways to write long lists."""


def word_list(text: str) -> tuple[str, ...]:
    """Split at white space."""
    return tuple(text.split())


def phrase_list(text: str) -> tuple[str, ...]:
    """Split at commas."""
    return tuple(" ".join(phrase.split()) for phrase in text.split(","))


def table(text: str) -> tuple[tuple[str, ...], ...]:
    """One row a line, columns separated by commas."""
    return tuple(phrase_list(row) for row in text.strip().splitlines())
