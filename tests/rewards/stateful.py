"""What reward functions of another module call, with state of its own."""

number = 0


def count() -> int:
    global number
    number += 1
    return number


class Counter:
    """Counts in an object."""

    def __init__(self) -> None:
        self.number = 0

    def count(self) -> int:
        self.number += 1
        return self.number


counter = Counter()
