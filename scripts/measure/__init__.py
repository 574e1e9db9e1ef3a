"""The programs that measure the numbers in docs/."""
