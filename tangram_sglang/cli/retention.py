"""The retention argument, read the same way by `tangram demo` and by the Makefile.

    python3 -m tangram_sglang.cli.retention 0.5

Needs the standard library only: the Makefile asks before there is a virtual environment.
"""

import argparse
import sys


def retention(text: str) -> float:
    """Parses a retention for argparse: the share of tokens kept, 1.0 being uncompressed."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(
            f"retention {text!r} is not a share of tokens to keep: "
            "expected a number above 0 and up to 1, such as 0.5"
        )
    return value


if __name__ == "__main__":
    try:
        retention(sys.argv[1])
    except argparse.ArgumentTypeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
