"""Campaigns: random models, random nets, hostile files, planted faults."""
