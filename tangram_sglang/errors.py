"""The one exception for mistakes a user can mend."""


class TangramError(ValueError):
    """Says what was wrong, what was expected and what to do; raised before serving starts."""
