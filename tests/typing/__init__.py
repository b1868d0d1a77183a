"""Files that a type checker reads and nobody runs."""  # noqa: A005 - a package of the tests, not on the path
