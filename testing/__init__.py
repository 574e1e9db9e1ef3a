"""Common parts of tests/ and scripts/: cases, random nets and models, comparison, files."""
