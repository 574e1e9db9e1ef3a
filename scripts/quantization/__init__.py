"""Trained nets, their quantised forms, and what they measure."""
