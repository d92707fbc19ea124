"""Scheduling: what each step computes and whose blocks give way. Integers only."""
