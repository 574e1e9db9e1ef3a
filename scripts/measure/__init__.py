"""What docs/ says in numbers."""
