"""`graphguard demo`."""


def main() -> int:
    return 0
