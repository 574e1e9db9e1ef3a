"""What tests/ and scripts/ share: cases, random nets and models, comparison, files."""
