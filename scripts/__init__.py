"""Scripts for developers; run them from the root of the repository: python -m scripts.NAME."""
