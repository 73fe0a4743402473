"""`graphguard bench capture`."""


def main() -> None: ...
