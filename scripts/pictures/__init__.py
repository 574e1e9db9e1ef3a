"""The pictures in docs/pictures; `python -m scripts.pictures` draws all of them again, from real runs."""
