"""A clock that moves only when a test says so."""


class MovedClock:
    """Begins at 100 seconds."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds
